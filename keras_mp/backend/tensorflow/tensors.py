"""Tensors and their bits."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns a tensor as it is."""
    # Keras alone hands TensorFlow's variable through, which a function with a gradient of its own refuses.
    return tf.convert_to_tensor(keras.ops.convert_to_tensor(x))


def is_variable(thing: Any) -> bool:
    """Tells whether something is a variable, of Keras or of TensorFlow."""
    return isinstance(thing, (keras.Variable, tf.Variable))


class _NativeVariable(NamedTuple):
    """What is read and assigned of a Keras variable, for one of TensorFlow's own."""

    value: tf.Variable

    def assign(self, value: Any) -> None:
        self.value.assign(value)


def as_keras_variable(variable: Any) -> Any:
    """A variable with `value` and `assign`, as Keras's have; None if it is not of the distribution strategy in use."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if not isinstance(native, tf.Variable) or not tf.distribute.get_strategy().extended.variable_created_in_scope(
        native
    ):
        return None
    return variable if isinstance(variable, keras.Variable) else _NativeVariable(native)


def operation_of(tensor: tf.Tensor, kind: str) -> tf.Operation | None:
    """The operation of a graph that computes a tensor, if it is of a kind such as "Cast"; else, and eagerly, None."""
    if isinstance(tensor, tf.__internal__.EagerTensor) or tensor.op.type != kind:
        return None
    return tensor.op


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return tf.bitcast(x, dtype)


def places(shape: tuple[Any, ...], start: Any = 0) -> Any:
    """Numbers the elements of a tensor in row-major order: uint32 of its shape, modulo 2**32.

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


def check_host_memory() -> None:
    """Refuses: XLA on TensorFlow has no names for memory of the host."""
    raise ValueError("state_memory='host' needs JAX: set the environment variable KERAS_BACKEND to 'jax'")


def fetches_early() -> bool:
    """Never: nothing lies in memory of the host."""
    return False


def keep_on_host(variable: keras.Variable) -> None:
    """Leaves a variable where it is."""


def fetched(array: Any, after: list[Any]) -> Any:
    """Returns the tensor: it is where it is used."""
    return array


def stored(array: Any) -> Any:
    """Returns the tensor: it stays where it is."""
    return array


def as_float4(x: Any) -> Any:
    """Casts numbers of E2M1 to E4M3, which holds them all: TensorFlow has no dtype of four bits."""
    return tf.cast(x, "float8_e4m3fn")
