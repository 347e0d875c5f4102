"""What a prepared model's step on a CPU replaces.

    silu(x) = x s(x),    gradient = upstream s(x) (1 + x (1 - s(x))),    s(x) = 1 / (1 + e^-x)

    gradient of a kernel = windows of x^T . upstream      (places x channels, rows) x (rows, filters)
    gradient of a bias   = ones . upstream                (1, rows) x (rows, features); in float32, rounded once

GELU and SiLU are islands, in float32 inside: Elfwing, Uchibe, Doya, "Sigmoid-Weighted Linear Units", 2017
(arXiv:1702.03118). Gradients of a convolution's kernel and of a bias are products of matrices. In bfloat16 TensorFlow's
kernel for the first, which is an island, takes up to five times as long where an image has few positions and many
channels. For the second `BiasAddGrad` adds up in bfloat16: of 4,096 rows drawn from N(0, 1), whose sum is 64 in size,
it is off by up to 18, so that there is the product without islands, too. It is also faster.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.backend.common.keras_patches import Make, patched
from keras_mp.backend.tensorflow.tensors import (
    has_islands,
    has_known_sizes,
    in_differentiated_island,
    is_differentiated_by_kernels_of_cpus,
    is_differentiated_island,
    operation_of,
    programs_if,
)

Gelu = Callable[[Any, bool], Any]

# Each size costs a compile.
MOST = 16
_FACTOR = 1_000_003  # a prime
_NONE = -1  # no size


def step_scopes(gelu: Gelu) -> Callable[[Any], AbstractContextManager[None]]:
    """Makes the scopes in which training steps are traced.

    Islands are compiled there for the first `MOST` batch sizes of the model.
    """
    sizes = BatchSizes()
    replacements = {
        "keras.src.backend.nn.conv": conv,
        "keras.src.backend.nn.gelu": gelu_by(gelu),
        "keras.src.backend.nn.silu": silu,
        "keras.src.backend.numpy.add": add,
    }

    @contextmanager
    def scope(batch: Any) -> Iterator[None]:
        with patched(replacements), sizes.of_step(batch):
            yield

    return scope


class BatchSizes:
    """Counts the batch sizes of one model's steps.

    A batch of several inputs, such as nodes and edges of graphs, has the sizes of all of them together. In a batch of
    another size than the first `most` the operations of islands run as kernels.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._counted: tf.lookup.experimental.MutableHashTable | None = None

    @contextmanager
    def of_step(self, batch: Any) -> Iterator[None]:
        """Lets a step on a batch be traced within."""
        tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)] if has_islands() else []
        sizes = [tf.shape(leaf)[0] for leaf in tensors if leaf.shape.rank and leaf.shape[0] is None]
        with programs_if(self._count(sizes)) if sizes else nullcontext():
            yield

    def _count(self, sizes: list[tf.Tensor]) -> tf.Tensor:
        """Whether programs are compiled for these sizes, a boolean tensor."""
        if self._counted is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counted = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)
                self._counted.insert([_NONE], [1])
        key = tf.constant([0], tf.int64)
        for size in sizes:
            key = key * _FACTOR + tf.cast(size, tf.int64)
        known = (self._counted.lookup(key) > 0) | (self._counted.size() <= self._most)
        self._counted.insert(tf.where(known, key, _NONE), [1])
        return known[0]


@cache  # so that two scopes with the same GELU replace Keras's once
def gelu_by(replacement: Gelu) -> Make:
    """Makes what makes the replacement of Keras's GELU."""

    def make(keras_own: Callable[..., Any]) -> Callable[..., Any]:
        def gelu(x: Any, approximate: bool = True) -> Any:
            x = tf.convert_to_tensor(x)
            if x.dtype.is_floating and has_known_sizes(x) and is_differentiated_island():
                return replacement(x, approximate)
            return keras_own(x, approximate)

        return gelu

    return make


def silu(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's SiLU."""

    def silu(x: Any) -> Any:
        x = tf.convert_to_tensor(x)
        y = in_differentiated_island(_silu_forward, _silu_backward, [x]) if x.dtype.is_floating else None
        return keras_own(x) if y is None else y

    return silu


def _silu_forward(x: tf.Tensor) -> tf.Tensor:
    wide = tf.cast(x, tf.float32)
    return tf.cast(wide * tf.sigmoid(wide), x.dtype)


def _silu_backward(upstream: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
    wide, upstream = tf.cast(x, tf.float32), tf.cast(upstream, tf.float32)
    gate = tf.sigmoid(wide)
    return [tf.cast(upstream * gate * (1.0 + wide * (1.0 - gate)), x.dtype)]


def conv(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's convolution, with products as gradients."""

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
    """Whether the product was measured to be faster.

    On 2 cores with bfloat16 instructions, of 16 and 64 images, it takes of the kernel's time 0.6 to 1.0 for one
    position a window; 0.2 to 1.1 for patches that do not overlap; 0.3 to 1.0 for 3 x 3 with strides of 2 and at least
    64 channels; 0.5 to 0.7 for 3 x 3 on at most 8 x 8 positions of at least 256 channels; 0.9 to 3 elsewhere.
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
    """Windows of an image, shape (rows, places x channels)."""
    height, width, channels = x.shape[1:]
    down, across = (_places(*sizes, padding) for sizes in zip((height, width), kernel, steps, outputs, strict=True))
    down, across = down[:, None, :, None], across[None, :, None, :]
    inside = (down >= 0) & (down < height) & (across >= 0) & (across < width)
    pixels = np.where(inside, down * width + across, height * width)
    # One zero pixel stands for all that lie outside.
    x = tf.pad(tf.reshape(x, (-1, height * width, channels)), ((0, 0), (0, 1), (0, 0)))
    return tf.reshape(tf.gather(x, pixels.ravel().astype("int32"), axis=1), (-1, math.prod(kernel) * channels))


def _places(side: int, size: int, step: int, output: int, padding: str) -> np.ndarray:
    """Where windows along a side lie, shape (outputs, size)."""
    # As TensorFlow pads: what is odd stands behind.
    before = max((output - 1) * step + size - side, 0) // 2 if padding.lower() == "same" else 0
    return np.arange(output)[:, None] * step + np.arange(size) - before


def add(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's addition, of a bias."""

    def add(x1: Any, x2: Any) -> Any:
        if not (_is_bias(x1, x2) and is_differentiated_by_kernels_of_cpus()):
            return keras_own(x1, x2)

        @tf.custom_gradient
        def shift(x: Any, bias: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                rows = tf.reshape(upstream, (-1, upstream.shape[-1]))
                return upstream, tf.matmul(tf.ones((1, tf.shape(rows)[0]), rows.dtype), rows)[0]

            return keras_own(x, bias), gradient

        x, bias = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
        reshape = _reshape_of_a_product(x)
        if reshape is None:
            return shift(x, bias)
        product, shape = reshape.inputs
        return tf.ensure_shape(tf.reshape(shift(product, bias), shape), x.shape)

    return add


def _reshape_of_a_product(x: tf.Tensor) -> tf.Operation | None:
    """The reshape that makes x of a product, or None.

    To the product the bias is added by the kernel that multiplies: TensorFlow merges the two where no reshape is
    between them.
    """
    reshape = operation_of(x, "Reshape")
    if reshape is None or operation_of(reshape.inputs[0], "MatMul") is None:
        return None
    return reshape if reshape.inputs[0].shape[-1] == x.shape[-1] else None


def _is_bias(x: Any, bias: Any) -> bool:
    """Whether Keras adds a bias by TensorFlow's kernel for biases."""
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
