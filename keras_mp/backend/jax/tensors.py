"""Tensors, their bits, and how others are computed."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.gradients import custom_gradient


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
    @custom_gradient
    def rows(table: Any, indices: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            (zero,) = barrier([jnp.zeros((), table.dtype)], [upstream])
            return jnp.broadcast_to(zero, table.shape).at[indices].add(upstream, mode="drop"), None

        return take(table, indices, axis=0), gradient

    def waiting(x: Any, indices: Any, axis: int | None = None) -> Any:
        x, indices = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(indices, sparse=False)
        is_table = axis == 0 and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
        return rows(x, indices) if is_table else take(x, indices, axis)

    return waiting


@contextmanager
def without_islands() -> Iterator[None]:
    """A scope that does nothing."""
    yield


# What a step on several devices has of variables while it is traced: the part of each device.

# The plans in force, each with the mesh that its axes belong to.
active: list[Any] = []
# Within a device's part of a step: of each variable that is split, by id, how the whole is made of the parts.
inside: list[dict[int, Any]] = []
# While a variable is read without gathering it.
reading_parts: list[bool] = []


class Division(NamedTuple):
    """How the compiler divides what is traced now among devices."""

    mesh: Any  # JAX's mesh
    batch: str  # the axis of the mesh that divides the rows of a batch
    others: tuple[str, ...]  # the other axes of the mesh that have several devices; they divide weights


def division() -> Division | None:
    """Returns how the compiler divides what is traced now.

    None on one device, or in a device's part of a step.
    """
    distribution = keras.distribution.distribution()
    if inside or not (active or distribution):
        return None
    mesh = active[-1].mesh if active else distribution.device_mesh.backend_mesh
    batch = distribution.batch_dim_name if distribution else mesh.axis_names[0]
    several = [name for name, size in mesh.shape.items() if size > 1]
    return Division(mesh, batch, tuple(name for name in several if name != batch)) if several else None


def is_on_one_device() -> bool:
    """Tells whether what is traced now computes on one device."""
    return division() is None


def part_of(variable: Any) -> tuple[Any, Any]:
    """Reads a variable, or an array, without gathering it.

    Also returned is how the whole is made of the devices' parts; where there are none, the whole and None.
    """
    part = inside[-1].get(id(variable)) if inside else None
    if part is None:
        return as_tensor(variable), None
    reading_parts.append(True)
    try:
        value = as_tensor(variable)
    finally:
        reading_parts.pop()
    return value, part if tuple(value.shape) != part.shape else None
