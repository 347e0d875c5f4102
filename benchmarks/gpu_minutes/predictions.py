"""The predictions of `inspect` for the steps on this chip, made without the GPU, to set beside the measured ones."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_minutes.process import emit
from benchmarks.gpu_minutes.steps import PATHS, REHEARSED, tasks
from keras_mp.bench.process import WorkloadError
from keras_mp.bench.workloads import Task, answer


def main(tiny: bool, target: str, *workloads: str) -> None:
    """A row for each step of each model; one that cannot be predicted says why."""
    environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    for workload in workloads:
        for task in tasks(workload):
            if task.function != "peer_keras:kit" or (tiny and task.name not in REHEARSED):
                continue
            row = {"model": workload, "step": task.name, "target": target}
            arguments = {**task.arguments, "target": target}
            try:
                foreseen = answer(Task(task.name, f"{__name__}:predicted", arguments, environment), PATHS)
            except WorkloadError as error:
                foreseen = {"problem": str(error)}
            emit(row | foreseen)


def predicted(workload: str, precision: str, target: str, fp8: str = "current") -> dict[str, Any]:
    """What `inspect` says of a step."""
    import keras
    from peer_keras import kit_compiled
    from peer_workloads import WORKLOADS, batch_of

    import keras_mp

    batch = tuple(keras.KerasTensor(array.shape, array.dtype.name) for array in batch_of(WORKLOADS[workload]))
    report = keras_mp.inspect(lambda: kit_compiled(workload, precision, fp8), batch, target)
    return {
        "ms predicted": 1e3 * report.time.seconds if report.time else None,
        "ms at best": 1e3 * report.roofline.seconds if report.roofline else None,
        "bound": report.roofline.bound if report.roofline else None,
        "peak bytes": report.memory.peak,
        "shares": report.shares,
    }
