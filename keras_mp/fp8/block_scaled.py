"""Operands in blocks that share a scale, and their product."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.fp8.scaling import BLOCK_SIZES, Scaling
from keras_mp.precision.formats import E2M1, E4M3, Format, cast, scale_to

engine = backend.engine_of(__package__)

BIAS, NAN = 127, 255
"""Of E8M0: 2^(bits - 127), and NaN where all bits are 1."""

_MANTISSA_BITS = 23  # of float32
_MANTISSA, _MAGNITUDE, _INFINITY = 0x7FFFFF, 0x7FFFFFFF, 0x7F800000

_MX, _NV = BLOCK_SIZES["E8M0"], BLOCK_SIZES["E4M3"]

TENSOR_SCALE = 2.0**110
"""The largest scale of a tensor in E2M1: divided by the smallest of a block, 2^-9, it is a float32 still."""

SMALLEST_SCALE = 2.0**-9
"""The smallest number of E4M3."""


class Blocks(NamedTuple):
    """A matrix whose rows are in blocks with a scale."""

    values: Any  # FP8 or E2M1, of shape (rows, columns), the columns a multiple of the block's size: zeros are appended
    scales: Any  # the scales of shape (rows, blocks of a row): uint8, the bits of E8M0, or E4M3
    factor: Any = None  # the tensor's own scale, of E2M1, float32 of shape (): x = values . scale . factor. None of FP8


# MX formats: blocks of 32 numbers, whose scale is a power of two of eight bits (E8M0).


def exponents(amax: Any, format: Format, scale: str) -> Any:
    """Scales of blocks, as the bits of E8M0 in int32.

    They are at least 2^-127, also where amax is 0, and NaN where it is not finite. "E8M0" rounds up, as cuDNN and
    Transformer Engine do.
    """
    bits = keras.ops.bitwise_and(backend.bitcast(amax, "int32"), _MAGNITUDE)
    fraction, exponent = math.frexp(format.max)
    mantissa = round((fraction * 2 - 1) * 2**_MANTISSA_BITS)
    # Where amax has more mantissa than the largest number, this carries into the exponent.
    carry = _MANTISSA - mantissa if scale == "E8M0" else 0
    biased = keras.ops.right_shift(bits + carry, _MANTISSA_BITS) - (exponent - 1)
    return keras.ops.where(bits < _INFINITY, keras.ops.maximum(biased, 0), NAN)


# NVFP4: blocks of 16 numbers of E2M1, whose scale is one of E4M3, below one of the tensor.


def tensor_scale(amax: Any) -> Any:
    """Scale of a tensor in E2M1, float32 of shape ()."""
    top = keras.ops.max(keras.ops.where(keras.ops.isfinite(amax), amax, float("inf")), initial=0)
    return keras.ops.minimum(scale_to(E2M1.max * E4M3.max, top), TENSOR_SCALE)


def block_scales(amax: Any, of_tensor: Any) -> Any:
    """Scales of blocks of E2M1, in E4M3; NaN like amax."""
    scaled = amax * (of_tensor * (1.0 / E2M1.max))
    # A maximum may leave a NaN out; a comparison does not.
    return cast(keras.ops.where(scaled < SMALLEST_SCALE, SMALLEST_SCALE, scaled), E4M3)


def hadamard(x: Any, axis: int, seed: int) -> Any:
    """Multiplies each 16 numbers by signs and the Hadamard matrix.

    The matrix is orthogonal, so that of two operands of a product, summed along this axis, the product stays.
    """
    shape = _in_blocks(x, axis, _NV)
    blocks = keras.ops.reshape(x, shape)
    # One by one, and not by reshaping: XLA's compiler for GPUs then keeps what lies between in registers.
    parts = [
        (blocks[:, place] if axis == 0 else blocks[:, :, place]) * sign
        for place, sign in enumerate(hadamard_signs(seed))
    ]
    for half in (8, 4, 2, 1):
        parts = [
            parts[place ^ half] - part if place & half else part + parts[place ^ half]
            for place, part in enumerate(parts)
        ]
    return keras.ops.reshape(keras.ops.stack([part * 0.25 for part in parts], axis=axis + 1), keras.ops.shape(x))


def hadamard_signs(seed: int) -> list[float]:
    """The 16 signs of a seed."""
    word = zlib.crc32(f"keras_mp.hadamard.{seed}".encode())
    return [1.0 - 2.0 * (word >> place & 1) for place in range(16)]


# Of a matrix, along one of its axes, or in tiles.


def quantize_matrix(x: Any, scaling: Scaling, axis: int, bits: Any = None) -> Blocks:
    """Rounds a matrix in blocks along one of its axes.

    It is transposed where that is 0, so that blocks run along rows; the last is filled up with zeros. Bits are words of
    stochastic rounding; without them it is to the nearest.
    """
    size = BLOCK_SIZES[scaling.scale]
    x = _padded(keras.ops.cast(x, "float32"), axis, size)
    if scaling.transform == "hadamard":
        x = hadamard(x, axis, scaling.seed)
    blocks = keras.ops.reshape(x, _in_blocks(x, axis, size))
    words = None if bits is None else keras.ops.reshape(_padded(bits, axis, size), keras.ops.shape(blocks))
    values, scales, factor = _rounded(blocks, _amax(blocks, axis + 1), (axis + 1,), scaling, words)
    values = keras.ops.reshape(values, keras.ops.shape(x))
    if axis == 0:
        # Otherwise XLA's compiler for GPUs, which wants rows in memory, transposes x, in four bytes a number.
        values, scales = (keras.ops.transpose(engine.row_major(y, ("cuda",))) for y in (values, scales))
    return Blocks(values, scales, factor)


def _rounded(blocks: Any, amax: Any, axes: tuple[int, ...], scaling: Scaling, bits: Any = None) -> Blocks:
    """Scales and rounds numbers that share scales along some axes."""
    if scaling.format == E2M1:
        of_tensor = tensor_scale(amax)
        scales = block_scales(amax, of_tensor)
        inverse, factor = of_tensor / keras.ops.cast(scales, "float32"), 1.0 / of_tensor
    else:
        bits_of_scale = exponents(amax, scaling.format, scaling.scale)
        scales, factor = keras.ops.cast(bits_of_scale, "uint8"), None
        # 1 / scale, exact: the scale of a finite amax is at most 2^120.
        opposite = keras.ops.left_shift(keras.ops.maximum(2 * BIAS - bits_of_scale, 1), _MANTISSA_BITS)
        inverse = keras.ops.where(bits_of_scale == NAN, float("nan"), backend.bitcast(opposite, "float32"))
    return Blocks(cast(blocks * keras.ops.expand_dims(inverse, axes), scaling.format, bits), scales, factor)


def quantize_tiles(x: Any, scaling: Scaling) -> Blocks:
    """Rounds a matrix, filled up with zeros, in square tiles.

    The tiles' scales have an axis for each of both.
    """
    x = keras.ops.cast(x, "float32")
    for axis in (0, 1):
        x = _padded(x, axis, _NV)
    shape = keras.ops.shape(x)
    tiles = keras.ops.reshape(x, _in_blocks(keras.ops.reshape(x, _in_blocks(x, 0, _NV)), 2, _NV))
    amax = _amax(keras.ops.reshape(keras.ops.transpose(tiles, (0, 2, 1, 3)), (shape[0] // _NV, shape[1] // _NV, -1)), 2)
    values, scales, factor = _rounded(tiles, amax, (1, 3), scaling)
    return Blocks(keras.ops.reshape(values, shape), scales, factor)


def rows_of_tiles(tiles: Blocks, axis: int, rows: int) -> Blocks:
    """Reads a matrix in tiles as blocks along rows.

    Blocks run along the axis; where it is 0, the matrix is transposed. Rows that were filled up are left out.
    """
    values, scales = (keras.ops.transpose(y) if axis == 0 else y for y in tiles[:2])
    # In float32: TensorFlow repeats no FP8.
    every = keras.ops.repeat(keras.ops.cast(scales, "float32"), _NV, axis=0)[:rows]
    return Blocks(values[:rows], keras.ops.cast(every, E4M3.dtype), tiles.factor)


def dequantize_rows(blocks: Blocks) -> Any:
    """Dequantizes a matrix in blocks, without the tensor's own factor.

    It is float32, exact down to the smallest normal number, and NaN in all of a block whose scale is NaN.
    """
    values = keras.ops.cast(blocks.values, "float32")
    if blocks.factor is None:
        scales = keras.ops.cast(blocks.scales, "int32")
        # Of half the scale: the smallest, 2^-127, is no normal number.
        double = backend.bitcast(keras.ops.left_shift(scales + 1, _MANTISSA_BITS), "float32")
        size, scales, values = _MX, keras.ops.where(scales == NAN, float("nan"), double), values * 0.5
    else:
        size, scales = _NV, keras.ops.cast(blocks.scales, "float32")
    by_block = keras.ops.reshape(values, _in_blocks(values, 1, size)) * scales[..., None]
    return keras.ops.reshape(by_block, keras.ops.shape(values))


def _amax(blocks: Any, axis: int) -> Any:
    """Largest magnitude of each block, also if not finite."""
    magnitudes = keras.ops.bitwise_and(backend.bitcast(blocks, "int32"), _MAGNITUDE)
    if axis == 2:
        # Of a matrix without rows, too.
        return backend.bitcast(keras.ops.max(magnitudes, axis=2, initial=0), "float32")
    # By halves: for a reduction over such an axis, XLA's compiler for GPUs writes a transposed copy.
    while (size := magnitudes.shape[1]) > 1:
        magnitudes = keras.ops.maximum(magnitudes[:, : size // 2], magnitudes[:, size // 2 :])
    return backend.bitcast(magnitudes[:, 0], "float32")


def _padded(x: Any, axis: int, size: int) -> Any:
    """Pads an axis with zeros to multiples of a size."""
    if x.shape[axis] is not None and x.shape[axis] % size == 0:
        return x
    shape = list(keras.ops.shape(x))
    shape[axis] = -shape[axis] % size
    return keras.ops.concatenate([x, keras.ops.zeros(shape, x.dtype)], axis=axis)


def _in_blocks(x: Any, axis: int, size: int) -> list[Any]:
    """Shape of a matrix with an axis in blocks."""
    shape = list(keras.ops.shape(x))
    return [*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]]


# The product of two.


def block_dot(left: Blocks, right: Blocks, dtype: str, name: str, apart: bool) -> Any:
    """Multiplies rows of two matrices in blocks: x . w^T.

    NVIDIA's Blackwell GPUs multiply such operands as they are, on JAX: `__cudnn$blockScaledDot` in the compiled
    program. Elsewhere the product is one of bfloat16 numbers, which hold value . scale exactly, of FP8 down to 2^-126:
    the same sums, and slower than bfloat16. `keras-mp inspect --target b200` shows which it is.
    """
    factor = None if left.factor is None else left.factor * right.factor

    def emulate(factor: Any, *operands: Any) -> Any:
        # Exact in bfloat16: a value has 4 bits or fewer, and the scale is a power of two, or 2 bits and 4.
        x, w = (
            keras.ops.cast(dequantize_rows(Blocks(values, scales, factor)), "bfloat16")
            for values, scales in (operands[:2], operands[2:])
        )
        one = keras.ops.ones(()) if factor is None else factor
        return engine.scaled_dot(x, w, ([1], [1]), one, dtype, precise=True, apart=apart, name=name)

    operands = left.values, left.scales, right.values, right.scales
    return engine.block_scaled_dot(operands, factor, dtype, name, emulate)


# A tensor as a matrix, one of whose axes a product sums over.


def as_matrix(x: Any, summed: Sequence[int]) -> tuple[Any, int]:
    """Reshapes a tensor to a matrix with one summed axis.

    The axes are summed in the order that the product's other operand has, too. It is a reshape where they are the first
    or the last. Of one of the two groups sizes may be unknown. Which axis is summed, 0 or 1, is returned beside it.
    """
    kept = [axis for axis in range(len(x.shape)) if axis not in summed]
    groups = [list(summed), kept] if list(summed) == list(range(len(summed))) else [kept, list(summed)]
    order = groups[0] + groups[1]
    if order != sorted(order):
        x = keras.ops.transpose(x, order)
    sizes = [[x.shape[order.index(axis)] for axis in group] for group in groups]
    matrix = keras.ops.reshape(x, [-1 if None in group else math.prod(group) for group in sizes])
    return matrix, groups.index(list(summed))
