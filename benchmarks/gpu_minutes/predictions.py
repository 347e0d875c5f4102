"""The predictions of `inspect` for the steps on this chip, made without the GPU, to set beside the measured ones."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_minutes.process import emit
from benchmarks.gpu_minutes.steps import PATHS, REHEARSED, tasks
from keras_mp.bench.workloads import Task, Workload, compare


def main(tiny: bool, target: str, *workloads: str) -> None:
    """A row for each step of each model; one that cannot be predicted says why."""
    environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    for workload in workloads:
        for task in tasks(workload):
            if task.function != "peer_keras:kit" or (tiny and task.name not in REHEARSED):
                continue
            row = {"model": workload, "step": task.name, "target": target}
            arguments = {**task.arguments, "target": target}
            asked = Task(task.name, f"{__name__}:predicted", arguments, environment)
            (foreseen,) = compare([asked], rounds=1, seconds=0.0, paths=PATHS)
            emit(
                row | ({"problem": f"{foreseen.problem}: {foreseen.reason}"} if foreseen.problem else foreseen.details)
            )


def predicted(workload: str, precision: str, target: str, fp8: str = "current") -> Workload:
    """What `inspect` says of a step, as the details of a workload that takes no time."""
    import keras
    from peer_keras import kit_compiled
    from peer_workloads import WORKLOADS, batch_of

    import keras_mp

    batch = tuple(keras.KerasTensor(array.shape, array.dtype.name) for array in batch_of(WORKLOADS[workload]))
    report = keras_mp.inspect(lambda: kit_compiled(workload, precision, fp8), batch, target)
    details: dict[str, Any] = {
        "ms predicted": 1e3 * report.time.seconds if report.time else None,
        "ms at best": 1e3 * report.roofline.seconds if report.roofline else None,
        "bound": report.roofline.bound if report.roofline else None,
        "peak bytes": report.memory.peak,
        "shares": report.shares,
    }
    return Workload(lambda steps: 0.0, details)
