"""Tensors, their bits, and how others are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private, because TensorFlow has no public barrier.
from tensorflow.compiler.tf2xla.python import xla as tfxla

# Private: no public name tells whether a tape records.
from tensorflow.python.eager.record import could_possibly_record

from keras_mp.backend.tensorflow.devices import traced_chip


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


# Islands: jitted programs, and other faster forms, inside a step that is not jitted as a whole.
#
# On a CPU TensorFlow's kernels multiply 16-bit matrices faster than XLA's code does, so that the step is not jitted.
# What lies between the products reads and writes memory once a kernel there, and once in all where XLA compiles it.

_lock = Lock()
_scopes_without = 0
_condition: ContextVar[Any] = ContextVar("condition", default=None)


@contextmanager
def without_islands() -> Iterator[None]:
    """Scope in which what is traced has no islands.

    It holds in every thread: each replica is traced in one of its own. What was traced before stays as it is, and so
    does what keeps only its input for the backward pass, as `keras_mp.layers.Gelu` does.
    """
    global _scopes_without
    with _lock:
        _scopes_without += 1
    try:
        yield
    finally:
        with _lock:
            _scopes_without -= 1


def has_islands() -> bool:
    """Tells whether what is traced now may have islands.

    Such is a graph for one CPU that is not jitted as a whole.
    """
    return not _scopes_without and tf.inside_function() and _runs_kernels_of_cpus()


def is_differentiated_island() -> bool:
    """Tells whether it may have islands, and a tape records."""
    return could_possibly_record() and has_islands()


def is_differentiated_by_kernels_of_cpus() -> bool:
    """Tells whether a tape records kernels of a CPU."""
    return could_possibly_record() and _runs_kernels_of_cpus()


def _runs_kernels_of_cpus() -> bool:
    return tf.__internal__.get_enclosing_xla_context() is None and traced_chip().platform == "cpu"


def in_differentiated_island(
    forward: Callable[..., Any], backward: Callable[..., list[Any]], tensors: list[Any], **settings: Hashable
) -> Any | None:
    """Calls a function as an island, forward and backward.

    The latter gets the tensors and nothing else. All calls with the same functions, shapes and settings share the two
    programs, so a new batch size compiles two; in the step of a prepared model not more than `step.MOST` of them.

    Args:
        forward: `forward(*tensors, **settings)`, a float tensor. It reads no variable.
        backward: `backward(upstream, *tensors, **settings)`, the gradient of each tensor.
        tensors: floats.

    Returns:
        The result; None where there is no island. That is also in inference, which an export keeps as plain operations,
        and where a size but for the first is unknown: each length would compile anew.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not (is_differentiated_island() and all(map(has_known_sizes, tensors))):
        return None

    @tf.custom_gradient
    def apply(*tensors: Any) -> Any:
        y = call_program(forward, *tensors, **settings)
        return y, lambda upstream: call_program(backward, upstream, *tensors, **settings)

    return apply(*tensors)


def has_known_sizes(tensor: tf.Tensor) -> bool:
    """Tells whether all sizes but the first are known."""
    # Else each new one would compile anew.
    return tensor.shape.rank is not None and None not in tensor.shape[1:]


@contextmanager
def programs_if(condition: tf.Tensor) -> Iterator[None]:
    """Scope in which programs run where a condition is true."""
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def call_program(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Calls a function as a jitted, shared program.

    It reads no variable, and is not differentiated: the caller has a gradient of its own. Settings are no tensors.
    """
    condition = _condition.get()
    if condition is None:
        return _jitted(function)(*arguments, **settings)
    return _jitted_if(function)(condition, *arguments, **settings)


@cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False)


@cache
def _jitted_if(function: Callable[..., Any]) -> Callable[..., Any]:
    program = _jitted(function)

    def choose(condition: tf.Tensor, *arguments: Any, **settings: Any) -> Any:
        return tf.cond(condition, lambda: program(*arguments, **settings), lambda: function(*arguments, **settings))

    return tf.function(choose, autograph=False)
