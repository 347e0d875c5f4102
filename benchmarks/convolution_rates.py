"""How near the ResNet-18's convolutions come to the rate of the processor's fastest matrix product.

    python benchmarks/convolution_rates.py

Each kind of convolution of the model that `peers.py` trains, in bfloat16 by TensorFlow's kernels: forward, the gradient
of the input, and that of the kernel, beside a product of 2048 x 2048; the median of 15 calls. A minute on 2 cores.
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

SIZE = 2048
CALLS = 15


def seconds(function: Callable[[], tf.Tensor]) -> float:
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

    return [seconds(function) for function in (forward, to_input, to_kernel)]


def main() -> None:
    sizes = WORKLOADS["resnet18"]
    model = kit_model(sizes)
    kinds: Counter = Counter()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Conv2D):
            (inputs, outputs) = (tuple((sizes.batch, *x.shape[1:])) for x in (layer.input, layer.output))
            kinds[inputs, tuple(layer.kernel.shape), layer.strides[0], outputs] += 1
    left, right = random(SIZE, SIZE), random(SIZE, SIZE)
    best = 2 * SIZE**3 / seconds(lambda: tf.matmul(left, right))
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


if __name__ == "__main__":
    main()
