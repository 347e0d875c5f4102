"""Steps on this machine's CPU: what is predicted of them, beside what `keras_mp.bench.benchmark` measures.

    KERAS_BACKEND=jax python benchmarks/planner/cpu_predictions.py        # 15 minutes on 2 cores without other work
    KERAS_BACKEND=jax python benchmarks/planner/cpu_predictions.py --rounds 3 --tables

No table of products on a CPU is published that fits every machine, so the constants are fitted here, in the way of
`fit_efficiency.py`, to products, convolutions and sums of two arrays that this command measures first. The models are
not among them. A step is compiled by `inspect`'s compiler for the host, with the CPU's XLA, and timed as for any chip.
Writes cpu_predictions.json, which the page of predictions reads; --tables keeps what was measured before of models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

KEPT = Path(__file__).with_name("cpu_predictions.json")
MODELS = ("gpt", "resnet18", "vit-tiny")
SECONDS = 0.3  # that each product, convolution or sum is repeated for
PRODUCTS = (
    *((n, n, n) for n in (64, 128, 256, 512, 1024, 2048)),
    *((2048, 384, n) for n in (64, 384, 1536)),
    *((n, 2048, 2048) for n in (1, 8, 32)),
)
# Rows, pixels of a side, channels and filters, of a window of 3 x 3 pixels.
CONVOLUTIONS = ((16, 32, 64, 64), (16, 16, 128, 128), (16, 8, 256, 256), (16, 4, 512, 512))
SUMS = tuple(2**power for power in range(10, 23, 3))  # numbers in each of two arrays


def measure() -> dict[str, list]:
    """The tables: seconds of products, of convolutions and their gradients, and of sums, in float32."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int) -> Any:
        return jax.random.normal(jax.random.key(0), shape, "float32")

    def convolved(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    tables: dict[str, list] = {"products": [], "sums of products": [], "convolutions": [], "transfers": []}
    for m, k, n in PRODUCTS:
        took = _took(jnp.matmul, array(m, k), array(k, n))
        tables["products"].append(["host", "float32", m, k, n, took, "here"])
    for rows, side, channels, filters in CONVOLUTIONS:
        x, kernel = array(rows, side, side, channels), array(3, 3, channels, filters)
        made = convolved(x, kernel)
        shapes = [list(x.shape), [3, 3], list(made.shape)]
        for function in (
            lambda made, x, kernel: convolved(x, kernel),
            lambda made, x, kernel: jax.vjp(lambda x: convolved(x, kernel), x)[1](made),
            lambda made, x, kernel: jax.vjp(lambda kernel: convolved(x, kernel), kernel)[1](made),
        ):
            took = _took(function, made, x, kernel)
            tables["convolutions"].append(["host", "float32", shapes, took, "convolution", "here"])
    for count in SUMS:
        took = _took(jnp.add, array(count), array(count))
        tables["transfers"].append(["host", 3 * 4 * count, took, "here"])
    return tables


def _took(function: Callable[..., Any], *arguments: Any) -> float:
    import jax

    run = jax.jit(function)
    jax.block_until_ready(run(*arguments))
    times = []
    until = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - started)
    return float(f"{statistics.median(times):.3g}")


def host_of(tables: dict[str, list]) -> Any:
    """This CPU as a chip: its peak rates are the best of the tables."""
    from keras_mp.precision.chips import Chip

    peak = max(2 * m * k * n / took for _, _, m, k, n, took, _ in tables["products"])
    bandwidth = max(moved / took for _, moved, took, _ in tables["transfers"])
    return Chip("host", "this machine's CPU", "cpu", "", {"float32": peak}, 0, bandwidth, "measured by this command")


def predict(name: str, tables: dict[str, list]) -> dict[str, float]:
    """Seconds of a step of a model, in parts."""
    from benchmarks.peer_keras import kit_compiled
    from benchmarks.peer_workloads import WORKLOADS, batch_of
    from benchmarks.planner.fit_efficiency import fit_one
    from keras_mp.lowering import lower_step
    from keras_mp.planner.chips.targets import find_target
    from keras_mp.planner.compile.compiler import compile_step
    from keras_mp.planner.read.matmuls import join
    from keras_mp.planner.time.step_time import step_time

    host = host_of(tables)
    efficiency, _ = fit_one(tables, chips={"host": host})
    batch = batch_of(WORKLOADS[name])
    lowered = lower_step(kit_compiled(name, "float32"), batch, training=True, chip=find_target("host").traced)
    compiled = compile_step(lowered, find_target("host"))
    took = step_time(join(compiled), compiled.module, host, efficiency=efficiency)
    return {"seconds": took.seconds, "products": took.products, "other": took.other, "kernels": took.kernels}


def benchmark(name: str, rounds: int) -> dict[str, float]:
    """The quartiles of a measured step, in seconds, and the rounds."""
    import keras_mp
    from benchmarks.peer_keras import kit_compiled
    from benchmarks.peer_workloads import WORKLOADS, batch_of

    report = keras_mp.bench.benchmark(kit_compiled(name, "float32"), batch_of(WORKLOADS[name]), rounds=rounds)
    step = report.step("float32")
    if step is None:
        raise RuntimeError(f"{name}: {report.problems}")
    return {"median": step.median, "low": step.low, "high": step.high, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tables", action="store_true", help="measure no model")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    tables = measure()
    measured = (
        kept.get("measured", {}) if options.tables else {name: benchmark(name, options.rounds) for name in MODELS}
    )
    predicted = {name: predict(name, tables) for name in MODELS}
    KEPT.write_text(json.dumps({"tables": tables, "measured": measured, "predicted": predicted}, indent=1) + "\n")
    for name in MODELS:
        took = measured.get(name, {}).get("median", float("nan"))
        print(f"{name}: {predicted[name]['seconds'] * 1e3:.1f} ms predicted, {took * 1e3:.1f} ms measured")


if __name__ == "__main__":
    main()
