"""Tensors and their bits."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns an array as it is."""
    return keras.ops.convert_to_tensor(x)


def is_variable(thing: Any) -> bool:
    """Tells whether something is a variable."""
    return isinstance(thing, keras.Variable)


def as_keras_variable(variable: keras.Variable) -> Any:
    """A variable with `value` and `assign`; None for one without a value yet."""
    return variable if variable._value is not None else None


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, dtype)


def places(shape: tuple[int, ...], start: Any = 0) -> Any:
    """Numbers the elements of an array in row-major order, across all devices: uint32 of its shape, modulo 2**32.

    Args:
        shape: The dimensions of the whole array.
        start: The first number, an int or a uint32 array of shape (). Of arrays that begin with different numbers XLA
            shares no part, for whose sake it would compute and keep them together.
    """
    # Not a reshaped range, which a TPU would lay out anew.
    iota = partial(jax.lax.broadcasted_iota, np.uint32, shape)
    strides = [math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape))]
    return sum(
        (iota(axis) * np.uint32(stride) for axis, stride in enumerate(strides)), jnp.full(shape, start, np.uint32)
    )


def as_float4(x: Any) -> Any:
    """Casts numbers of E2M1 to the dtype of four bits."""
    return x.astype(jnp.float4_e2m1fn)
