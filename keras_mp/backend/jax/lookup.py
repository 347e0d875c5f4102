"""Rows that are looked up in a table, whose gradient takes no memory before it is there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax.numpy as jnp
import keras

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.gradients import custom_gradient
from keras_mp.backend.jax.transforms import barrier


def lookups_wait() -> AbstractContextManager[None]:
    """A scope in which the gradient of a table begins, with zeros, when that of its rows is there.

    XLA for GPUs makes JAX's zeros before the backward pass: an array of the size of an embedding that waits for it.
    """
    return patched({"keras.src.backend.numpy.take": _waiting})


def _waiting(take: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_take, take)


def _take(take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
    x, indices = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(indices, sparse=False)
    is_table = axis == 0 and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    return _rows(take)(x, indices) if is_table else take(x, indices, axis)


def _rows(take: Callable[..., Any]) -> Callable[..., Any]:
    @custom_gradient
    def rows(table: Any, indices: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            (zero,) = barrier([jnp.zeros((), table.dtype)], [upstream])
            return jnp.broadcast_to(zero, table.shape).at[indices].add(upstream, mode="drop"), None

        return take(table, indices, axis=0), gradient

    return rows
