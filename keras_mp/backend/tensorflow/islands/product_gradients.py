"""Gradients as products of matrices, in a training step on a CPU: of a convolution's kernel, and of a bias.

    gradient of a kernel = windows of x^T . upstream      (places x channels, rows) x (rows, filters)
    gradient of a bias   = ones . upstream                (1, rows) x (rows, features); in float32, rounded once

In bfloat16 TensorFlow's kernel for the first, which is an island, takes up to five times as long where an image has few
positions and many channels. For the second `BiasAddGrad` adds up in bfloat16: of 4,096 rows drawn from N(0, 1), whose
sum is 64 in size, it is off by up to 18, so that there is the product without islands, too. It is also faster.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.backend.tensorflow.islands.programs import is_differentiated_by_kernels_of_cpus, is_differentiated_island
from keras_mp.backend.tensorflow.tensors import operation_of


def conv(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's convolution: its kernel gets its gradient by a product, where that is faster."""

    def conv(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
    ) -> Any:
        arguments = (strides, padding, data_format, dilation_rate)
        plain = data_format in (None, "channels_last") and {dilation_rate} <= {1, (1, 1)} and len(inputs.shape) == 4
        if not plain or not is_differentiated_island():
            return keras_own(inputs, kernel, *arguments)
        inputs, kernel = tf.convert_to_tensor(inputs), tf.convert_to_tensor(kernel)
        steps = (strides, strides) if isinstance(strides, int) else tuple(strides)
        if not _is_faster(inputs, kernel, steps):
            return keras_own(inputs, kernel, *arguments)

        @tf.custom_gradient
        def convolve(inputs: Any, kernel: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                to_inputs = tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=tf.shape(inputs),
                    filter=kernel,
                    out_backprop=upstream,
                    strides=(1, *steps, 1),
                    padding=padding.upper(),
                )
                return to_inputs, _to_kernel(inputs, kernel.shape, upstream, steps, padding)

            return keras_own(inputs, kernel, *arguments), gradient

        return convolve(inputs, kernel)

    return conv


def _is_faster(inputs: Any, kernel: Any, steps: tuple[int, int]) -> bool:
    """Whether the product was measured to be faster: on 2 cores with bfloat16 instructions, 16 and 64 images.

    Of the kernel's time it takes 0.6 to 1.0 for one position a window; 0.2 to 1.1 for patches that do not overlap;
    0.3 to 1.0 for 3 x 3 with strides of 2 and at least 64 channels; 0.5 to 0.7 for 3 x 3 on at most 8 x 8 positions of
    at least 256 channels; 0.9 to 3 elsewhere.
    """
    height, width, channels = inputs.shape[1:]
    if inputs.dtype != tf.bfloat16 or None in (height, width) or kernel.shape[2] != channels:
        return False  # unknown sizes, and convolutions in groups
    if tuple(kernel.shape[:2]) == steps:
        return True
    if tuple(kernel.shape[:2]) == (1, 1):
        return False
    if steps == (1, 1):
        return height * width <= 64 and channels >= 256
    return channels >= 64


def _to_kernel(x: Any, shape: Any, upstream: Any, steps: tuple[int, int], padding: str) -> Any:
    """The gradient of the kernel."""
    rows = tf.reshape(upstream, (-1, shape[3]))
    if tuple(shape[:2]) == tuple(steps) == (1, 1):
        return tf.reshape(tf.matmul(tf.reshape(x, (-1, shape[2])), rows, transpose_a=True), shape)
    windows = _windows(x, shape[:2], steps, upstream.shape[1:3], padding)
    return tf.reshape(tf.matmul(windows, rows, transpose_a=True), shape)


def _windows(x: Any, kernel: Sequence[int], steps: Sequence[int], outputs: Sequence[int], padding: str) -> Any:
    """What the places of the kernel are multiplied with, side by side: shape (rows, places x channels)."""
    height, width, channels = x.shape[1:]
    down, across = (_places(*sizes, padding) for sizes in zip((height, width), kernel, steps, outputs, strict=True))
    down, across = down[:, None, :, None], across[None, :, None, :]
    inside = (down >= 0) & (down < height) & (across >= 0) & (across < width)
    pixels = np.where(inside, down * width + across, height * width)
    # One zero pixel stands for all that lie outside.
    x = tf.pad(tf.reshape(x, (-1, height * width, channels)), ((0, 0), (0, 1), (0, 0)))
    return tf.reshape(tf.gather(x, pixels.ravel().astype("int32"), axis=1), (-1, math.prod(kernel) * channels))


def _places(side: int, size: int, step: int, output: int, padding: str) -> np.ndarray:
    """Where the windows along one side lie: shape (outputs, size), outside of the image where it is padded."""
    # As TensorFlow pads: what is odd stands behind.
    before = max((output - 1) * step + size - side, 0) // 2 if padding.lower() == "same" else 0
    return np.arange(output)[:, None] * step + np.arange(size) - before


def add(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's addition: a bias in bfloat16 gets its gradient by a product."""

    def add(x1: Any, x2: Any) -> Any:
        if not (_is_bias(x1, x2) and is_differentiated_by_kernels_of_cpus()):
            return keras_own(x1, x2)

        @tf.custom_gradient
        def shift(x: Any, bias: Any) -> Any:
            return keras_own(x, bias), lambda upstream: (upstream, _sum_of_rows(upstream))

        x, bias = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
        reshape = _reshape_of_a_product(x)
        if reshape is None:
            return shift(x, bias)
        product, shape = reshape.inputs
        return tf.ensure_shape(tf.reshape(shift(product, bias), shape), x.shape)

    return add


def _reshape_of_a_product(x: tf.Tensor) -> tf.Operation | None:
    """The reshape that makes x of a product of matrices with the same features; None where x is something else.

    To the product the bias is added by the kernel that multiplies: TensorFlow merges the two where no reshape is
    between them.
    """
    reshape = operation_of(x, "Reshape")
    if reshape is None or operation_of(reshape.inputs[0], "MatMul") is None:
        return None
    return reshape if reshape.inputs[0].shape[-1] == x.shape[-1] else None


def _is_bias(x: Any, bias: Any) -> bool:
    """Whether Keras adds `bias` by TensorFlow's kernel for biases, with features last."""
    shapes = [getattr(tensor, "shape", None) for tensor in (x, bias)]
    if any(shape is None or tf.TensorShape(shape).rank is None for shape in shapes):
        return False
    return (
        not isinstance(x, tf.SparseTensor)
        and {getattr(tensor.dtype, "name", tensor.dtype) for tensor in (x, bias)} == {"bfloat16"}
        and len(x.shape) > 1
        and len(bias.shape) == 1
        and bias.shape[0] == x.shape[-1]
        and bias.shape[0] not in (None, 1)
    )


def _sum_of_rows(upstream: Any) -> Any:
    rows = tf.reshape(upstream, (-1, upstream.shape[-1]))
    return tf.matmul(tf.ones((1, tf.shape(rows)[0]), rows.dtype), rows)[0]
