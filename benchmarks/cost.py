"""What each feature of the kit costs on top of plain Keras: time of a step, and bytes that the compiled step moves.

    python benchmarks/cost.py                    # TensorFlow and JAX, a GPT and a ResNet; 15 minutes on 2 cores
    python benchmarks/cost.py --out docs/results/cost.json
    KERAS_BACKEND=jax python benchmarks/cost.py --bytes gpt2-124m

Time is a ratio to plain Keras in the same run, in mixed_bfloat16; every feature has a process of its own, and
measurements are interleaved. Callbacks are measured in `fit`, beside `fit` without them. Bytes are those that the
kernels of the step read and write when it is compiled for an H100, as a ratio, too; they do not depend on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import write
from rich.console import Console
from rich.table import Table

from keras_mp.bench.process import WorkloadError
from keras_mp.bench.workloads import Task, Workload, answer, compare, ratio

STEP, FIT = "plain Keras, a step", "plain Keras, fit"
# Features of the step, and callbacks; a callback that watches the loss scale needs the optimizer that has one.
FEATURES = ("stabilize", "NoLossScale", "LossScale", "LossScale, atomic_skip")
CALLBACKS = (
    "PrecisionMonitor",
    "PrecisionMonitor, every 50",
    "PrecisionMonitor, gradients measured",
    "NonFiniteFinder",
)
BACKENDS = ("tensorflow", "jax")
WORKLOADS = ("gpt", "resnet18")


def model_with(workload: str, features: str) -> Any:
    """Plain Keras's model, with features of the kit."""
    import keras
    import peer_keras
    from peer_workloads import WORKLOADS as SIZES

    import keras_mp

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, optimizer = peer_keras.plain_model(SIZES[workload]), peer_keras.optimizer()
    if "stabilize" in features:
        model = keras_mp.stabilize(model)
    if "NoLossScale" in features:
        optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none())
    elif "LossScale" in features:
        optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale(2.0))
    model.compile(optimizer, peer_keras.cross_entropy(), jit_compile=keras.backend.backend() == "jax")
    return keras_mp.loss_scaling.atomic_skip(model) if "atomic_skip" in features else model


def step(workload: str, features: str) -> Workload:
    """A training step with features, without callbacks."""
    from peer_workloads import WORKLOADS as SIZES
    from peer_workloads import batch_of

    from keras_mp.bench.keras_step import of_model

    return of_model(model_with(workload, features), batch_of(SIZES[workload]), "mixed_bfloat16")


def fit(workload: str, callback: str) -> Workload:
    """Steps in `fit`, with a callback."""
    import numpy as np
    from peer_workloads import WORKLOADS as SIZES
    from peer_workloads import batch_of

    import keras_mp

    model = model_with(workload, "NoLossScale")
    batch = batch_of(SIZES[workload])
    rows = SIZES[workload].batch

    def batches(steps: int) -> Any:
        data = [np.repeat(array, steps, 0) for array in batch]
        return keras_mp.training.ShuffledBatches(*data, rows, 0)

    def callbacks() -> list:
        if "PrecisionMonitor" in callback:
            every = 50 if "every 50" in callback else 1
            return [keras_mp.PrecisionMonitor(measure_gradients="measured" in callback, every=every)]
        return [keras_mp.NonFiniteFinder()] if callback == "NonFiniteFinder" else []

    def run(steps: int) -> float:
        data = batches(steps)
        started = time.perf_counter()
        model.fit(data, epochs=1, verbose=0, callbacks=callbacks())
        return time.perf_counter() - started

    return Workload(run, {})


def compiled_bytes(workload: str, features: str) -> float:
    """What the kernels of the step read and write when it is compiled for an H100."""
    import keras
    from peer_workloads import WORKLOADS as SIZES
    from peer_workloads import batch_of

    import keras_mp

    arrays = [keras.KerasTensor(array.shape, array.dtype.name) for array in batch_of(SIZES[workload])]
    model = model_with(workload, features)
    model.jit_compile = True
    return keras_mp.inspect(model, tuple(arrays), "h100").roofline.memory


def measured(workload: str, backend: str, rounds: int) -> list[list[str]]:
    """The rows of a model on a backend."""
    environment = {"KERAS_BACKEND": backend}

    def task(name: str, function: str, **arguments: str) -> Task:
        return Task(name, f"cost:{function}", {"workload": workload, **arguments}, environment)

    log = lambda text: print(f"{workload}, {backend}: {text}", file=sys.stderr)  # noqa: E731
    paths = [str(HERE), str(HERE.parent)]
    tasks = [task(STEP, "step", features=""), *(task(name, "step", features=name) for name in FEATURES)]
    steps = compare(tasks, rounds=rounds, seconds=0.3, paths=paths, log=log)
    tasks = [task(FIT, "fit", callback=""), *(task(name, "fit", callback=name) for name in CALLBACKS)]
    fits = compare(tasks, rounds=rounds, seconds=1.0, paths=paths, log=log)
    moved = {}
    for name in ("", *FEATURES):
        log(f"bytes of {name or STEP}")
        try:
            moved[name] = answer(task(name, "compiled_bytes", features=name), paths)
        except WorkloadError as error:
            log(f"no bytes of {name or STEP}: {error}")
            moved[name] = None
    rows = []
    for base, group in ((steps[0], steps[1:]), (fits[0], fits[1:])):
        for row in group:
            if row.problem or base.problem:
                rows.append([workload, backend, row.name, row.problem or base.problem, "", row.reason or base.reason])
                continue
            of_base = ratio(row.seconds, base.seconds)
            mine, plain = moved.get(row.name), moved[""]
            share = f"{mine / plain:.3f}" if mine and plain else ""
            spread = f"{of_base.low:.2f}-{of_base.high:.2f}"
            rows.append([workload, backend, row.name, f"{of_base.median:.3f}", spread, share])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(WORKLOADS), help="of benchmarks/peer_workloads.py")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON")
    parser.add_argument(
        "--bytes", metavar="MODEL", help="only the bytes, of this model, on the backend in KERAS_BACKEND"
    )
    options = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if options.bytes:
        plain = compiled_bytes(options.bytes, "")
        for name in FEATURES:
            print(f"{name}: {compiled_bytes(options.bytes, name) / plain:.3f}")
        return
    columns = ["model", "backend", "feature", "of plain Keras's time", "middle half", "of its bytes on an H100"]
    rows = []
    for workload in options.models.split(","):
        for backend in options.backends.split(","):
            rows += measured(workload, backend, options.rounds)
            table = Table(*columns)
            for row in rows:
                table.add_row(*row)
            Console(width=120).print(table)
    if options.out:
        from keras_mp.system.packages import installed

        versions = installed(("keras", "tensorflow", "jax", "numpy"))
        command = f"python benchmarks/cost.py --models {options.models} --rounds {options.rounds}"
        write(options.out, "What each feature costs on top of plain Keras", command, columns, rows, versions)


if __name__ == "__main__":
    main()
