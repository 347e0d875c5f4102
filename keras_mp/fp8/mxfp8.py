"""MXFP8: blocks of 32 numbers that share a scale, the scaling recipe, and the product with its gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import keras

from keras_mp import backend
from keras_mp.fp8.quantized_dot import first_order, first_order_operands, summed_axes
from keras_mp.fp8.scaling_recipe import Quantized, Recipe, RoleFormats
from keras_mp.precision.formats import E4M3, Format, cast

# MX formats: blocks of 32 numbers that share a scale, a power of two of eight bits (E8M0).

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


# An operand of a product as a matrix, one of whose axes the product sums over.


def as_matrix(x: Any, summed: Sequence[int]) -> tuple[Any, int]:
    """Makes one axis of those that a product sums over, and one of the others.

    It is a reshape where the product sums over the first axes or over the last ones.

    Args:
        x: a tensor; on TensorFlow, sizes may be unknown, of one of the two groups of axes.
        summed: axes, in the order that the product's other operand has, too.

    Returns:
        A tensor of two axes, and which of them, 0 or 1, the product sums over.
    """
    groups = _groups(len(x.shape), summed)
    order = groups[0] + groups[1]
    if order != sorted(order):
        x = keras.ops.transpose(x, order)
    sizes = [[x.shape[order.index(axis)] for axis in group] for group in groups]
    matrix = keras.ops.reshape(x, [-1 if None in group else math.prod(group) for group in sizes])
    return matrix, groups.index(list(summed))


def from_matrix(matrix: Any, shape: Sequence[Any], summed: Sequence[int]) -> Any:
    """Undoes `as_matrix` for a tensor of this shape."""
    order = sum(_groups(len(shape), summed), [])
    x = keras.ops.reshape(matrix, [shape[axis] for axis in order])
    return x if order == sorted(order) else keras.ops.transpose(x, [order.index(axis) for axis in range(len(order))])


def _groups(rank: int, summed: Sequence[int]) -> list[list[int]]:
    """The axes that are summed over and the others, those first that stand first."""
    kept = [axis for axis in range(rank) if axis not in summed]
    return [list(summed), kept] if list(summed) == list(range(len(summed))) else [kept, list(summed)]


# The scaling recipe of MXFP8 products: a power-of-two scale for every 32 numbers of an operand.


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class MXFP8Scaling(Recipe):
    """A power-of-two scale for every 32 numbers along the axes that a product sums over. There is no state.

        scale = 2^ceil(log2(amax / max of the format))      "up", of a block of 32: no number saturates
              = 2^(floor(log2 amax) - floor(log2 max))      "floor": the largest numbers of a block may saturate
        x8    = cast(x / scale)                             scale is at least 2^-127, and NaN where x is not finite
        y     = sum over blocks of (x8 . w8) (sx sw)        in float32

    The three products sum over different axes, so inputs, kernel and gradient are each quantized twice. Blocks run over
    the summed axes as one, batch and positions for the kernel's gradient; the last is filled up with zeros.

    NVIDIA's Blackwell GPUs multiply such operands as they are, on JAX: `__cudnn$blockScaledDot` in the compiled
    program. Elsewhere the product is one of bfloat16 numbers, which hold x8 . scale exactly down to 2^-126: the same
    sums, and slower than bfloat16. `keras-mp inspect --target b200` shows which it is.

    A layer whose kernel is split over devices gathers it in 16 bits: two FP8 copies would be as many bytes.

    Formula: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 and 6.3; "up" is that of Mishra et al.,
    "Recipes for Pre-training LLMs with MXFP8", 2025 (arXiv:2506.08027), who find that "floor" can diverge, and that
    gradients need no E5M2.

    Args:
        format: as of `CurrentScaling`; E4M3 for all by default, since a block needs less range than a tensor.
        scale_rounding: "up" or "floor".

    Raises:
        ValueError: unknown scale_rounding; or as `CurrentScaling`.
    """

    format: RoleFormats = RoleFormats(E4M3, E4M3, E4M3)
    scale_rounding: str = "up"
    # Of the base.
    power_of_two: bool = dataclasses.field(init=False, default=True)
    per_row: ClassVar[bool] = True
    operands: ClassVar[str] = "MXFP8"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in SCALE_ROUNDING:
            listed = " or ".join(map(repr, SCALE_ROUNDING))
            raise ValueError(f"scale_rounding={self.scale_rounding!r} is unknown: use {listed}")

    @property
    def takes_parts(self) -> bool:
        return False

    def blocks(self, x: Any, role: str, axes: tuple[int, ...]) -> Blocks:
        """Quantizes an operand as a matrix whose rows a product sums over.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient".
            axes: those that the product sums over.

        Returns:
            The matrix, its rows along these axes.

        Raises:
            ValueError: there is no such role.
        """
        matrix, axis = as_matrix(x, axes)
        return quantize_matrix(matrix, self.format_of(role), self.scale_rounding, axis)

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        """Scales a tensor into the format of its role; the scale is float32 of x's shape, one for each number."""
        axes = (-1,) if axes is None else axes
        axes = tuple(axis % len(x.shape) for axis in axes)
        values, exponents = self.blocks(x, role, axes)
        scales = keras.ops.repeat(inverse_scale(exponents), BLOCK, axis=1)
        matrix, axis = as_matrix(x, axes)
        size = keras.ops.shape(matrix)[axis]

        def of_x(rows: Any) -> Any:
            own = rows[:, :size]
            return from_matrix(own if axis else keras.ops.transpose(own), keras.ops.shape(x), axes)

        return Quantized(of_x(values), of_x(scales))


# The matrix product of an MXFP8 layer and its gradients.


def mxfp8_product(
    inputs: Any,
    kernel: Any,
    recipe: MXFP8Scaling,
    equations: tuple[str, str, str],
    dtype: str,
    path: str,
    apart: bool,
) -> Any:
    """Multiplies inputs by a kernel as `MXFP8Scaling` says; the gradients as well.

    Args:
        inputs: floats.
        kernel: floats.
        recipe: the scaling recipe.
        equations: of the product, of the gradient of the inputs, and of that of the kernel.
        dtype: of the result.
        path: names the products in the compiled program.
        apart: whether the compiler may not fuse what follows into the product.

    Returns:
        The product. The gradients have the dtypes of inputs and kernel.
    """
    forward, to_inputs, to_kernel = equations
    input_dtype, kernel_dtype = (keras.backend.standardize_dtype(x.dtype) for x in (inputs, kernel))

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        sizes = dict(
            zip(
                forward.split("->")[0].replace(",", ""),
                (*keras.ops.shape(inputs), *keras.ops.shape(kernel)),
                strict=True,
            )
        )

        def operand(role: str, x: Any, equation: str, place: int) -> Blocks:
            return recipe.blocks(x, role, summed_axes(equation)[place])

        def product(equation: str, left: Blocks, right: Blocks, dtype: str, role: str, apart: bool = False) -> Any:
            return _dot(equation, left, right, sizes, dtype, f"{path}/keras_mp.{role}", apart)

        def gradient(g: Any) -> Any:
            (g,) = first_order_operands([g], path)
            with scope():
                g_by_row, g_by_column = operand("gradient", g, to_inputs, 0), operand("gradient", g, to_kernel, 1)
                gradients = [
                    product(to_inputs, g_by_row, w_by_row, input_dtype, "input_gradient"),
                    product(to_kernel, x_by_column, g_by_column, kernel_dtype, "kernel_gradient"),
                ]
                return first_order(gradients, g, [], path)

        x, w = operand("input", inputs, forward, 0), operand("kernel", kernel, forward, 1)
        x_by_column, w_by_row = operand("input", inputs, to_kernel, 0), operand("kernel", kernel, to_inputs, 1)
        return product(forward, x, w, dtype, "forward", apart), gradient

    return multiply(inputs, kernel)


def _dot(equation: str, left: Blocks, right: Blocks, sizes: dict[str, Any], dtype: str, name: str, apart: bool) -> Any:
    """An einsum of two operands that were quantized along the axes that it sums over."""

    def emulate(*operands: Any) -> Any:
        # Exact in bfloat16: a value has 4 bits or fewer, and the scale is a power of two.
        x, w = (keras.ops.cast(dequantize_rows(Blocks(*pair)), "bfloat16") for pair in (operands[:2], operands[2:]))
        axes, one = ([1], [1]), keras.ops.ones(())
        return backend.scaled_dot(x, w, axes, one, dtype, precise=True, apart=apart, name=name)

    out = backend.block_scaled_dot(*left, *right, dtype, name=name, emulate=emulate)
    operands, result = equation.split("->")
    kept = [label for label in operands.replace(",", "") if label in result]
    out = keras.ops.reshape(out, [sizes[label] for label in kept])
    return out if kept == list(result) else keras.ops.transpose(out, [kept.index(label) for label in result])
