"""Convolutions in bfloat16 by TensorFlow's kernels, on a CPU with bfloat16 instructions.

    python benchmarks/convolutions.py rates
    python benchmarks/convolutions.py kernel_gradients

`rates`: how near the ResNet-18's convolutions come to the rate of the processor's fastest matrix product. Each kind of
convolution of the model that `peers.py` trains: forward, the gradient of the input, and that of the kernel, beside a
product of 2048 x 2048; the median of 15 calls. A minute on 2 cores.

`kernel_gradients`: the gradient of a convolution's kernel as a matrix product, its time of that of TensorFlow's kernel,
with "same" padding; two minutes. The median of seven rounds, which measure both, with the range of the middle five.
`keras_mp.backend.tensorflow.islands.product_gradients` takes the product for the cases that are marked.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import keras
import tensorflow as tf
from peer_keras import kit_model
from peer_workloads import WORKLOADS

from keras_mp.backend.tensorflow.islands import product_gradients

SIZE = 2048
CALLS = 15

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


def median_of(function: Callable[[], tf.Tensor]) -> float:
    """Of a call, the median."""
    graph = tf.function(function)
    times = []
    for _ in range(CALLS + 2):
        started = time.perf_counter()
        graph().numpy()
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[CALLS // 2]


def random(*shape: int) -> tf.Tensor:
    return tf.cast(tf.random.normal(shape), tf.bfloat16)


def passes(images: tuple[int, ...], kernel: tuple[int, ...], stride: int, outputs: tuple[int, ...]) -> list[float]:
    """Seconds of a convolution forward, of its input's gradient and of its kernel's."""
    x, weights, upstream = random(*images), random(*kernel), random(*outputs)
    options = {"strides": (1, stride, stride, 1), "padding": "SAME"}

    def forward() -> tf.Tensor:
        return tf.nn.conv2d(x, weights, **options)

    def to_input() -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropInput(input_sizes=images, filter=weights, out_backprop=upstream, **options)

    def to_kernel() -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=kernel, out_backprop=upstream, **options)

    return [median_of(function) for function in (forward, to_input, to_kernel)]


def rates() -> None:
    """Prints a line for each kind of convolution, and the sum."""
    sizes = WORKLOADS["resnet18"]
    model = kit_model(sizes)
    kinds: Counter = Counter()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Conv2D):
            (inputs, outputs) = (tuple((sizes.batch, *x.shape[1:])) for x in (layer.input, layer.output))
            kinds[inputs, tuple(layer.kernel.shape), layer.strides[0], outputs] += 1
    left, right = random(SIZE, SIZE), random(SIZE, SIZE)
    best = 2 * SIZE**3 / median_of(lambda: tf.matmul(left, right))
    print(f"a product of {SIZE} x {SIZE}: {best / 1e9:.0f} GFLOP/s")
    operations = measured = 0.0
    for (inputs, kernel, stride, outputs), count in kinds.items():
        flops = 2.0 * outputs[0] * outputs[1] * outputs[2] * kernel[0] * kernel[1] * kernel[2] * kernel[3]
        times = passes(inputs, kernel, stride, outputs)
        if kernel[2] == 3:  # the image needs no gradient
            del times[1]
        operations += count * flops * len(times)
        measured += count * sum(times)
        rates = ", ".join(f"{flops / each / best:.2f}" for each in times)
        print(f"{count} x {kernel[:2]} of {inputs[1:]}, stride {stride}, to {outputs[3]}: {rates} of that", flush=True)
    print(
        f"{operations / 1e9:.1f} GFLOP a step: {operations / best * 1e3:.0f} ms at the product's rate, "
        f"{measured * 1e3:.0f} ms by these kernels"
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


def kernel_gradients() -> None:
    """Prints a line for each case."""
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
    {"rates": rates, "kernel_gradients": kernel_gradients}[sys.argv[1]]()
