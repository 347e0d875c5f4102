"""From which size of products on bfloat16 gains on this CPU, with TensorFlow and without jit.

    KERAS_BACKEND=tensorflow python benchmarks/product_sizes.py --out docs/results/product-sizes.json

A Dense layer of a float32 kernel, width x width, on a batch of rows, forward; and a training step of four such layers
with Adam. Float32 and mixed_bfloat16 take turns within one run, so that a busy machine slows both; the ratio is the
median over the rounds. Two minutes on 2 cores.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from results import write

from keras_mp import backend
from keras_mp.bench.workloads import interleave, ratio, spread, steps_per_round
from keras_mp.system.packages import installed

POLICIES = ("float32", "mixed_bfloat16")
ROWS = (32, 256, 2048)
WIDTHS = (32, 64, 128, 256, 512, 1024)
LARGEST = 2048 * 512 * 512  # multiply-adds of a product; above it the gain no longer changes, and a step takes long


def layer(policy, rows, width):
    """A function that runs the layer forward so many times, and returns the seconds."""
    dense = keras.layers.Dense(width, activation="relu", dtype=policy)
    x = tf.constant(np.random.default_rng(0).normal(size=(rows, width)), dense.compute_dtype)
    dense.build(x.shape)
    forward = tf.function(dense)
    forward(x)

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            y = forward(x)
        y.numpy()
        return time.perf_counter() - start

    return run


def step(policy, rows, width):
    """The same of a training step of four of them."""
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(width, dtype="float32")])
    model.compile("adam", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    run = backend.timed_steps(model, (x, x))
    run(2)
    return run


def measured(make, rows, width, rounds):
    """Milliseconds in float32, and the ratio of mixed_bfloat16 to it, with its quartiles."""
    ways = {policy: make(policy, rows, width) for policy in POLICIES}
    steps = {policy: steps_per_round(run(3) / 3, 0.03) for policy, run in ways.items()}
    seconds = interleave(ways, steps, rounds)
    of_float32 = ratio(seconds["mixed_bfloat16"], seconds["float32"])
    median = 1e3 * spread(seconds["float32"]).median
    return f"{median:.3g}", f"{of_float32.median:.2f} ({of_float32.low:.2f}-{of_float32.high:.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    columns = ["rows", "width", "a layer in float32, ms", "in bfloat16, of that", "a step in float32, ms"]
    columns.append("in mixed_bfloat16, of that")
    table = []
    for rows in ROWS:
        for width in WIDTHS:
            if rows * width * width > LARGEST:
                continue
            table.append([rows, width, *measured(layer, rows, width, options.rounds)])
            table[-1] += measured(step, rows, width, options.rounds)
            print(*table[-1], sep="\t", flush=True)
    if options.out:
        command = f"KERAS_BACKEND=tensorflow python benchmarks/product_sizes.py --rounds {options.rounds}"
        title = "From which size of products on bfloat16 gains on a CPU"
        write(options.out, title, command, columns, table, installed(("keras", "tensorflow", "numpy")))


if __name__ == "__main__":
    main()
