"""Functions that change how others are computed: in one kernel, again, in a loop, without memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.gradients import custom_gradient


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the tensors, unused before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    return list(jax.lax.optimization_barrier((*tensors, *others))[: len(tensors)])


def gradient_scope() -> Callable[[], Any]:
    """Makes a scope that does nothing."""
    # JAX names a backward pass after its forward pass.
    return nullcontext


def no_allocation() -> AbstractContextManager[None]:
    """Scope in which initialized variables get no value."""

    def without_value(variable: keras.Variable, initializer: Any) -> None:
        variable._value, variable._initializer = None, initializer

    def keep_initializer(variable: keras.Variable) -> None:
        without_value(variable, variable._initializer)

    return patched(
        {
            "keras.Variable._initialize_with_initializer": lambda initialize: without_value,
            "keras.Variable._deferred_initialize": lambda initialize: keep_initializer,
        }
    )


# Rows that are looked up in a table, whose gradient takes no memory before it is there.


def lookups_wait() -> AbstractContextManager[None]:
    """Scope in which a table's gradient waits for its rows'.

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


@contextmanager
def without_islands() -> Iterator[None]:
    """A scope that does nothing."""
    yield
