"""Tensors and their bits, and functions that change how others are computed: in one kernel, without memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private, because TensorFlow has no public barrier.
from tensorflow.compiler.tf2xla.python import xla as tfxla


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns a tensor as it is."""
    # Keras alone hands TensorFlow's variable through, which a function with a gradient of its own refuses.
    return tf.convert_to_tensor(keras.ops.convert_to_tensor(x))


def operation_of(tensor: tf.Tensor, kind: str) -> tf.Operation | None:
    """Returns a tensor's operation if it is of a kind."""
    if isinstance(tensor, tf.__internal__.EagerTensor) or tensor.op.type != kind:
        return None
    return tensor.op


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of elements as another dtype."""
    return tf.bitcast(x, dtype)


def places(shape: tuple[Any, ...], start: Any = 0) -> Any:
    """Numbers elements in row-major order, uint32 modulo 2**32.

    Args:
        shape: ints, and int32 tensors of shape () where a size is not known before the program runs.
        start: The first number, an int or a uint32 tensor of shape ().
    """
    numbers = tf.fill(shape, tf.cast(start, tf.uint32))
    stride = tf.constant(1, tf.uint32)
    for axis in reversed(range(len(shape))):
        size = shape[axis]
        numbers += tf.reshape(tf.cast(tf.range(size), tf.uint32) * stride, [-1, *[1] * (len(shape) - axis - 1)])
        stride *= tf.cast(size, tf.uint32)
    return numbers


def as_float4(x: Any) -> Any:
    """Casts numbers of E2M1 to E4M3, which holds them all."""
    # TensorFlow has no dtype of four bits.
    return tf.cast(x, "float8_e4m3fn")


def is_on_one_device() -> bool:
    """Returns True: a replica is one device with all weights."""
    return True


def part_of(variable: Any) -> tuple[Any, Any]:
    """Reads a variable, which each device has whole here."""
    return as_tensor(variable), None


def is_concrete(tensor: Any) -> bool:
    """Tells whether a tensor has a value now."""
    return hasattr(tensor, "numpy")


def to_numpy(variable: keras.Variable) -> np.ndarray:
    """Reads a variable."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values that a tensor stores."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    if isinstance(gradient, tf.SparseTensor):
        return gradient.with_values(function(gradient.values))
    if isinstance(gradient, tf.RaggedTensor):
        return gradient.with_flat_values(function(gradient.flat_values))
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the values that any kind of tensor stores."""
    if isinstance(gradient, tf.RaggedTensor):
        return gradient.flat_values
    return gradient.values if isinstance(gradient, (tf.IndexedSlices, tf.SparseTensor)) else gradient


def dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor of its variable's shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the tensors, unused before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    # Without jit the operation copies, so of the others it is given one number.
    others = [tf.reshape(other, [-1])[:1] for other in others]
    return list(tfxla.optimization_barrier(*tensors, *others)[: len(tensors)])


def gradient_scope() -> Callable[[], Any]:
    """Makes the name scope of a custom gradient's backward pass."""
    name = tf.get_current_name_scope()
    return lambda: tf.name_scope(f"gradient_tape/{name}/")


def no_allocation() -> Any:
    """A scope that does nothing: TensorFlow's variables have values."""
    return nullcontext()


def lookups_wait() -> AbstractContextManager[None]:
    """Scope that does nothing."""
    # The gradient of a lookup is the rows that were looked up, and no zeros.
    return nullcontext()
