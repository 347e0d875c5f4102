"""The gradient of a convolution's kernel as a matrix product: its time, of that of TensorFlow's kernel.

    python benchmarks/kernel_gradients.py

In bfloat16, with "same" padding, on a CPU with bfloat16 instructions; about two minutes on 2 cores. The median of seven
rounds, which measure both, with the range of the middle five. The module that is
imported here takes the product for the cases that are marked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tensorflow as tf

from keras_mp.backend.tensorflow.islands import product_gradients

IMAGES = (16, 64)
# Size of the kernel, stride, channels, filters, and pixels of a side.
CASES = (
    *((3, 1, channels, channels, side) for channels, side in ((64, 32), (128, 16), (128, 28), (256, 8), (256, 14))),
    *((3, 1, 512, 512, side) for side in (4, 7)),
    *((3, 2, channels, 2 * channels, side) for channels, side in ((32, 32), (64, 32), (64, 56), (128, 16), (128, 28))),
    *((3, 2, 256, 512, side) for side in (8, 14)),
    *((1, 1, channels, channels, side) for channels, side in ((64, 32), (256, 14))),
    *((1, 2, channels, 2 * channels, side) for channels, side in ((64, 32), (256, 8))),
    *((2, 2, channels, 2 * channels, side) for channels, side in ((96, 56), (384, 14))),
    *((size, size, 3, filters, side) for size, filters, side in ((4, 96, 224), (8, 192, 64), (16, 192, 224))),
)


def functions(size: int, step: int, channels: int, filters: int) -> tuple[Callable, Callable]:
    """The gradient as a product, and as TensorFlow's kernel gives it, from images and from the gradient upstream."""
    shape = (size, size, channels, filters)

    def as_product(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        return product_gradients._to_kernel(x, shape, upstream, (step, step), "same")

    def as_kernel(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=shape, out_backprop=upstream, strides=(1, step, step, 1), padding="SAME"
        )

    return tf.function(as_product), tf.function(as_kernel)


def seconds(function: Callable, x: tf.Tensor, upstream: tf.Tensor, repeats: int) -> float:
    """Of one call."""
    started = time.perf_counter()
    for _ in range(repeats):
        result = function(x, upstream)
    result.numpy()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    for images in IMAGES:
        for size, step, channels, filters, side in CASES:
            x, upstream = (
                tf.cast(tf.random.normal((images, pixels, pixels, depth)), tf.bfloat16)
                for pixels, depth in ((side, channels), (-(-side // step), filters))
            )
            both = functions(size, step, channels, filters)
            for function in both:
                seconds(function, x, upstream, 1)
            rounds = [[seconds(function, x, upstream, 160 // images) for function in both] for _ in range(7)]
            ratios = sorted(product / kernel for product, kernel in rounds)
            taken = product_gradients._is_faster(x, tf.zeros((size, size, channels, filters)), (step, step))
            print(
                f"{images} images, {size} x {size}, stride {step}, {channels} to {filters} channels, {side} x {side}: "
                f"{ratios[3]:.2f} ({ratios[1]:.2f} to {ratios[5]:.2f}) of {sorted(k for _, k in rounds)[3] * 1e3:.2f} "
                f"ms{', taken' if taken else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
