"""Tensors and their bits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns an array as it is."""
    return keras.ops.convert_to_tensor(x)


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of elements as another dtype."""
    return jax.lax.bitcast_convert_type(x, dtype)


def places(shape: tuple[int, ...], start: Any = 0) -> Any:
    """Numbers elements in row-major order, across all devices.

    Of arrays that begin with different numbers XLA shares no part, for whose sake it would compute and keep them
    together.
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


def is_concrete(tensor: Any) -> bool:
    """Tells whether a tensor has a value now."""
    return isinstance(tensor, jax.Array) and not isinstance(tensor, jax.core.Tracer) and not tensor.is_deleted()


def to_numpy(variable: keras.Variable) -> np.ndarray:
    """Reads a variable; one split over processes, all must read."""
    value = variable.value
    if not value.is_fully_addressable and not value.is_fully_replicated:
        from jax.experimental import multihost_utils  # not above, because Keras does not import it

        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values that a tensor stores."""
    if not isinstance(gradient, BCOO):
        return function(gradient)
    indices = gradient.indices
    known = {"indices_sorted": gradient.indices_sorted, "unique_indices": gradient.unique_indices}
    return BCOO((function(gradient.data), indices), shape=gradient.shape, **known)


def values_of(gradient: Any) -> Any:
    """Returns the values that a dense or sparse tensor stores."""
    return gradient.data if isinstance(gradient, BCOO) else gradient


def dense(gradient: Any) -> Any:
    """Returns the gradient: it is dense."""
    return gradient
