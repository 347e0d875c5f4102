"""What a step costs with our LossScaleOptimizer: against Keras's own, and against no scaling at all.

    KERAS_BACKEND=tensorflow python benchmarks/loss_scale.py
    KERAS_BACKEND=jax python benchmarks/loss_scale.py

Float32 dense models and Adam, on synthetic data; the three optimizers are interleaved within one run, so that a busy
machine slows all of them. Prints, for a small and a 20-million-parameter model, jitted and not, the median step in
milliseconds and the median over the rounds of the ratios. A few minutes on 2 cores.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_mp

OPTIMIZERS = {
    "none": lambda: keras.optimizers.Adam(1e-4),
    "keras": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
    "ours": lambda: keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
    "ours, checks only": lambda: keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-4), keras_mp.LossScale.none()),
}
# What jit_compile=False means to Keras: on JAX each operation is made by itself.
UNJITTED = {"tensorflow": "graph", "jax": "eager"}
SIZES = {"small (17 k)": (64, [128, 64], 64), "20 M": (1024, [4096, 3900], 32)}


def build(width, hidden, optimizer, jit):
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    return model


def stepper(model, x, y):
    """A function that makes some steps as `fit` does, without its callbacks, and returns the seconds of one."""
    model.train_on_batch(x, y)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data = tf.constant(x), tf.constant(y), None
        step = model.train_function

        def run(steps):
            start = time.perf_counter()
            for _ in range(steps):
                logs = step(iter([data]))
            np.asarray(logs["loss"])
            return (time.perf_counter() - start) / steps

        return run
    import jax

    values = [
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    ]
    # The step donates its state, so each model needs a copy that is its own.
    state = jax.tree.map(lambda value: value.copy(), tuple(values))
    data = jax.device_put((x, y, None))
    step = model.train_function

    def run(steps):
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            _, state = step(state, iter([data]))
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / steps

    return run


def measure(width, hidden, batch, jit, rounds, steps):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, width)).astype("float32"), rng.integers(0, 10, batch)
    runs = {name: stepper(build(width, hidden, make(), jit), x, y) for name, make in OPTIMIZERS.items()}
    for run in runs.values():
        run(2)
    names = list(runs)
    times = []
    for index in range(rounds):
        order = names[index % len(names) :] + names[: index % len(names)]  # nobody always comes first
        times.append({name: runs[name](steps) for name in order})
    return times


def ratio(times, name, base):
    """The median over the rounds, and the middle half of them."""
    low, middle, high = statistics.quantiles([round_times[name] / round_times[base] for round_times in times], n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one optimizer in a round")
    parser.add_argument("--only", choices=[*SIZES], help="one of the two models")
    arguments = parser.parse_args()
    backend = keras.backend.backend()
    title = f"{backend}, median of {arguments.rounds} rounds (middle half)"
    table = Table(
        "model", "mode", "none, ms", "ours / none", "keras / none", "ours / keras", "checks only / none", title=title
    )
    for size, (width, hidden, batch) in SIZES.items():
        if arguments.only not in (None, size):
            continue
        for jit in (True, False):
            once = statistics.median(round_times["none"] for round_times in measure(width, hidden, batch, jit, 2, 3))
            times = measure(width, hidden, batch, jit, arguments.rounds, max(1, round(arguments.seconds / once)))
            table.add_row(
                size,
                "jit" if jit else UNJITTED[backend],
                f"{1000 * statistics.median(round_times['none'] for round_times in times):.3f}",
                ratio(times, "ours", "none"),
                ratio(times, "keras", "none"),
                ratio(times, "ours", "keras"),
                ratio(times, "ours, checks only", "none"),
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
