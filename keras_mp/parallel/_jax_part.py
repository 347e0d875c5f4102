"""One variable of a fully sharded step: gathered, and summed.

Gathered in one byte, a weight is E4M3 with a scale for each row, along its last axis:

    amax  = max |x| of the row
    scale = 2^floor(log2 min(448 / amax, 2^126))        1 where amax is 0, infinite or NaN
    codes = cast(x . scale)                             x = codes / scale

A scale is a power of two, so that scaling rounds nothing, and codes / scale is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_mp.precision.formats import E4M3, scale_and_cast, scale_to

AXIS = "batch"
"""The axis of the mesh over which batches and variables are split."""

# Where as many devices gather parts of so few bytes, libtpu 0.0.42 adds all parts to arrays of zeros, which sends twice
# as much; a gather over one dimension of a slice stays one. Of smaller parts that does not matter.
_ADDED_FROM = 64
_ADDED_BYTES = range(2**10, 2**18 + 1)


class VariablePart(NamedTuple):
    """How one variable is split, gathered, and its gradient summed."""

    axis: int | None  # the axis that is split; None for a variable that each device has whole
    dtype: str  # the dtype in which it is gathered: that which its layer computes in
    reduce_dtype: str  # the dtype in which its gradient is summed
    # the groups of devices of each of the sums one after the other; empty for a sum over all at once. Small parts are
    # gathered over the same groups
    groups: Sequence[Any]
    overwritten: bool  # whether its gradient is its next value, of which the largest counts
    spec: PartitionSpec  # the layout, as JAX writes it
    shape: tuple[int, ...]  # the shape of the whole
    in_8_bits: bool = False  # whether it is gathered in E4M3, and not in `dtype`

    def gathered(self, value: Any) -> Any:
        """Gathers the whole, rounded as its layer rounds it.

        Its gradient is this device's part of the sum over all.
        """

        @jax.custom_vjp
        def gather(value: Any) -> Any:
            if not self.in_8_bits:
                return self.joined(value.astype(self.dtype)).astype(value.dtype)
            # Each device has a part of every row, or whole rows, of which the scales are gathered as well.
            within = self.axis == value.ndim - 1
            amax = jnp.max(jnp.abs(value), axis=-1).astype("float32")
            # Without the last axis, which a TPU would pad to 128.
            scales = scale_to(E4M3.max, self.largest(amax) if within else amax, power_of_two=True)
            codes = self.joined(scale_and_cast(value, E4M3, scales[..., None]))
            scales = scales if within else self.joined(scales)
            return (codes.astype("float32") * (1.0 / scales)[..., None]).astype(self.dtype).astype(value.dtype)

        def backward(_: None, gradient: Any) -> tuple[Any]:
            if self.overwritten:
                return (self.of_whole(jax.lax.pmax(gradient, AXIS)),)
            return (self.of_sum(gradient),)

        gather.defvjp(lambda value: (gather(value), None), backward)
        return gather(value)

    def joined(self, value: Any) -> Any:
        """Gathers the whole array bit for bit, without a gradient."""
        # As integers: a compiler for a chip without products of 8-bit floats would widen these before they are sent.
        float8 = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize == 1
        sent = jax.lax.bitcast_convert_type(value, "uint8") if float8 else value
        assert self.axis is not None
        added = jax.lax.axis_size(AXIS) >= _ADDED_FROM and sent.size * sent.dtype.itemsize in _ADDED_BYTES
        whole = put_together(sent, self.axis, self.groups if added else ())
        return jax.lax.bitcast_convert_type(whole, value.dtype) if float8 else whole

    def largest(self, amax: Any) -> Any:
        """Returns the largest magnitudes over the devices, in float32."""
        # The order of the bits is that of the magnitudes; a maximum of floats may leave NaNs out.
        bits = jax.lax.bitcast_convert_type(amax.astype("float32"), "int32")
        return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, AXIS), "float32")

    def of_sum(self, gradient: Any) -> Any:
        """Sums gradients of the whole; returns this device's part."""
        assert self.axis is not None
        part = scattered(gradient.astype(self.reduce_dtype), self.axis, self.groups)
        # Where libtpu makes of this a sum of the whole and a slice, it fuses the slice into what reads it, the norm
        # of all gradients among others; the barrier has the part made here, so that the whole is not kept.
        return jax.lax.optimization_barrier(part).astype(gradient.dtype)

    def summed(self, gradient: Any) -> Any:
        """Sums the gradient of a variable that is not split."""
        if self.axis is not None:
            return gradient
        if self.overwritten:
            return jax.lax.pmax(gradient, AXIS)
        return jax.lax.psum(gradient.astype(self.reduce_dtype), AXIS).astype(gradient.dtype)

    def of_whole(self, value: Any) -> Any:
        """This device's part of a whole variable."""
        if self.axis is None:
            return value
        size = self.shape[self.axis] // jax.lax.axis_size(AXIS)
        return jax.lax.dynamic_slice_in_dim(value, jax.lax.axis_index(AXIS) * size, size, self.axis)


def scattered(value: Any, axis: int, groups: Sequence[Any]) -> Any:
    """Sums over the devices; returns this device's part.

    The groups are those of `keras_mp.parallel.hops.groups_of`; empty for a sum over all at once.
    """
    for members in groups or [None]:
        value = jax.lax.psum_scatter(value, AXIS, scatter_dimension=axis, axis_index_groups=members, tiled=True)
    return value


def put_together(value: Any, axis: int, groups: Sequence[Any]) -> Any:
    """Gathers the whole of the parts that `scattered` makes."""
    for members in groups[::-1] or [None]:
        value = jax.lax.all_gather(value, AXIS, axis=axis, axis_index_groups=members, tiled=True)
    return value
