"""What a step of the audit of ResNet-50 costs, against a plain float32 training step, interleaved.

    KERAS_BACKEND=tensorflow python benchmarks/audit_cost.py
    KERAS_BACKEND=jax python benchmarks/audit_cost.py

Batch 8 of 224 x 224 images. Prints the median of both and of the rounds' ratios. A few minutes on 2 cores.
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

from keras_mp.numerics.audit import SAMPLE, _Run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    shape = (options.size, options.size, 3)
    model = keras.applications.ResNet50(weights=None, input_shape=shape, classifier_activation=None)
    # As the kit trains on a CPU: jitted on JAX, not on TensorFlow.
    jit = keras.backend.backend() == "jax"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=jit)
    random = np.random.default_rng()
    x = random.normal(size=(options.batch_size, *shape)).astype("float32")
    y = random.integers(0, 1000, options.batch_size)
    run = _Run(model, SAMPLE)
    run.take((x, y, None))
    model.train_on_batch(x, y)
    plain, audited = [], []
    for _ in range(options.rounds):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        plain.append(time.perf_counter() - start)
        run.take((x, y, None))
        audited.append(run.seconds[-1])
    ratios = [ours / theirs for ours, theirs in zip(audited, plain, strict=True)]
    print(
        f"ResNet-50, batch {options.batch_size}, {keras.backend.backend()}: "
        f"plain step {statistics.median(plain):.2f} s, "
        f"audit step {statistics.median(audited):.2f} s, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
