"""GELU and SiLU as islands on a CPU: the time forward and backward, of that of Keras's kernels.

    python benchmarks/activations.py

On TensorFlow; the median of seven rounds, which measure both. A minute on 2 cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import tensorflow as tf

from keras_mp import backend
from keras_mp.lean.gelu import gelu

KINDS: dict[str, Callable] = {
    "GELU": lambda x: keras.ops.gelu(x, approximate=False),
    "GELU by tanh": lambda x: keras.ops.gelu(x, approximate=True),
    "SiLU": keras.ops.silu,
}
SHAPES = ((64, 64), (8, 64, 64), (8, 197, 768), (16, 32, 32, 64), (8, 256, 1536))
REPEATS = 15


def step_of(kind: Callable, islands: bool) -> Callable:
    """From (x, gradient of y) to y and the gradient of x."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with backend.step_scopes(gelu)(()) if islands else nullcontext(), tf.GradientTape() as tape:
            tape.watch(x)
            y = kind(x)
        return y, tape.gradient(y, x, upstream)

    return step


def seconds(step: Callable, x: tf.Tensor, upstream: tf.Tensor) -> float:
    """Of one call."""
    started = time.perf_counter()
    for _ in range(REPEATS):
        result = step(x, upstream)
    result[1].numpy()
    return (time.perf_counter() - started) / REPEATS


def main() -> None:
    for name, kind in KINDS.items():
        for dtype in ("bfloat16", "float32"):
            for shape in SHAPES:
                x, upstream = (tf.cast(tf.random.normal(shape), dtype) for _ in range(2))
                both = [step_of(kind, islands) for islands in (True, False)]
                for step in both:
                    step(x, upstream)
                rounds = [[seconds(step, x, upstream) for step in both] for _ in range(7)]
                ratios = sorted(island / own for island, own in rounds)
                own = sorted(own for _, own in rounds)[3]
                print(f"{name}, {dtype}, {shape}: {ratios[3]:.2f} of {own * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
