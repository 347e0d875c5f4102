"""MX formats: blocks of 32 numbers that share a scale, a power of two of eight bits (E8M0)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.precision.formats import Format, cast

BLOCK = 32
"""Numbers that share a scale."""

BIAS, NAN = 127, 255
"""Of E8M0: 2^(bits - 127), and NaN where all bits are 1."""

SCALE_ROUNDING = ("up", "floor")

_MANTISSA_BITS = 23  # of float32
_MANTISSA, _MAGNITUDE, _INFINITY = 0x7FFFFF, 0x7FFFFFFF, 0x7F800000


class Blocks(NamedTuple):
    """A matrix in an MX format, whose rows are in blocks.

    Attributes:
        values: FP8 of shape (rows, columns), the columns a multiple of 32: zeros are appended.
        exponents: uint8 of shape (rows, columns / 32), the bits of E8M0.
    """

    values: Any
    exponents: Any


def exponents(amax: Any, format: Format, rounding: str) -> Any:
    """The scales of blocks.

        "up"     2^ceil(log2(amax / max of the format))             no number saturates
        "floor"  2^(floor(log2 amax) - floor(log2 max of the format))

    At least 2^-127, also where amax is 0; NaN where it is not finite.

    Formula: "floor" is OCP Microscaling Formats (MX) Specification v1.0, section 6.3; "up" is Mishra et al., "Recipes
    for Pre-training LLMs with MXFP8", 2025 (arXiv:2506.08027), section 3.1, as cuDNN and Transformer Engine have it.

    Args:
        amax: float32 of any shape.
        format: of the numbers.
        rounding: "up" or "floor".

    Returns:
        int32 of amax's shape, the bits of E8M0.
    """
    bits = keras.ops.bitwise_and(backend.bitcast(amax, "int32"), _MAGNITUDE)
    top, mantissa = _parts(format.max)
    # Where amax has more mantissa than the largest number, this carries into the exponent.
    carry = _MANTISSA - mantissa if rounding == "up" else 0
    biased = keras.ops.right_shift(bits + carry, _MANTISSA_BITS) - top
    return keras.ops.where(bits < _INFINITY, keras.ops.maximum(biased, 0), NAN)


def inverse_scale(exponents: Any) -> Any:
    """1 / scale, exact: float32 of the shape of the bits; NaN where these are E8M0's NaN."""
    bits = keras.ops.cast(exponents, "int32")
    # The scale of a finite amax is at most 2^120.
    inverse = backend.bitcast(keras.ops.left_shift(keras.ops.maximum(2 * BIAS - bits, 1), _MANTISSA_BITS), "float32")
    return keras.ops.where(bits == NAN, float("nan"), inverse)


def quantize_matrix(x: Any, format: Format, rounding: str, axis: int) -> Blocks:
    """Rounds a matrix to an MX format, in blocks along one of its axes, from the beginning.

        values = cast(x / scale)        saturating; NaN where x is not finite

    Args:
        x: floats of two axes, whose sizes may be unknown.
        format: `E4M3` or `E5M2`.
        rounding: of the scales, as of `exponents`.
        axis: 0 or 1.

    Returns:
        The matrix, transposed where axis is 0, so that blocks run along rows; the last is filled up with zeros.
    """
    x = _padded(keras.ops.cast(x, "float32"), axis)
    blocks = keras.ops.reshape(x, _in_blocks(x, axis))
    scales = keras.ops.cast(exponents(_amax(blocks, axis + 1), format, rounding), "uint8")
    values = cast(blocks * keras.ops.expand_dims(inverse_scale(scales), axis + 1), format)
    values = keras.ops.reshape(values, keras.ops.shape(x))
    if axis == 1:
        return Blocks(values, scales)
    # Otherwise XLA's compiler for GPUs, which wants rows in memory, transposes x, in four bytes a number.
    return Blocks(*(keras.ops.transpose(backend.row_major(y, ("cuda",))) for y in (values, scales)))


def dequantize_rows(blocks: Blocks) -> Any:
    """The numbers of a matrix in an MX format, exact down to float32's smallest normal number.

    Args:
        blocks: as `quantize_matrix` returns it, with scales of at most 2^126.

    Returns:
        float32 of shape (rows, columns), NaN in all of a block whose scale is NaN.
    """
    scales = keras.ops.cast(blocks.exponents, "int32")
    # Of half the scale: the smallest, 2^-127, is no normal number.
    double = backend.bitcast(keras.ops.left_shift(scales + 1, _MANTISSA_BITS), "float32")
    double = keras.ops.where(scales == NAN, float("nan"), double)
    halves = keras.ops.cast(blocks.values, "float32") * 0.5
    halves = keras.ops.reshape(halves, _in_blocks(halves, 1)) * double[..., None]
    return keras.ops.reshape(halves, keras.ops.shape(blocks.values))


def _amax(blocks: Any, axis: int) -> Any:
    """The largest magnitude of each block; infinite where one is not finite, on all platforms."""
    magnitudes = keras.ops.bitwise_and(backend.bitcast(blocks, "int32"), _MAGNITUDE)
    if axis == 2:
        return backend.bitcast(keras.ops.max(magnitudes, axis=2), "float32")
    # By halves: for a reduction over such an axis, XLA's compiler for GPUs writes a transposed copy.
    size = BLOCK
    while size > 1:
        size //= 2
        magnitudes = keras.ops.maximum(magnitudes[:, :size], magnitudes[:, size : 2 * size])
    return backend.bitcast(magnitudes[:, 0], "float32")


def _padded(x: Any, axis: int) -> Any:
    """A matrix with zeros at the end of an axis, up to a multiple of 32."""
    if x.shape[axis] is not None and x.shape[axis] % BLOCK == 0:
        return x
    shape = list(keras.ops.shape(x))
    shape[axis] = -shape[axis] % BLOCK
    return keras.ops.concatenate([x, keras.ops.zeros(shape, "float32")], axis=axis)


def _in_blocks(x: Any, axis: int) -> list[Any]:
    """The shape of a matrix with one of its axes in blocks."""
    shape = list(keras.ops.shape(x))
    return [*shape[:axis], shape[axis] // BLOCK, BLOCK, *shape[axis + 1 :]]


def _parts(number: float) -> tuple[int, int]:
    """The exponent of a number, unbiased, and the 23 bits of its mantissa."""
    fraction, exponent = math.frexp(number)
    return exponent - 1, round((fraction * 2 - 1) * 2**_MANTISSA_BITS)
