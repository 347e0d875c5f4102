"""The scaling recipe of MXFP8 products: a power-of-two scale for every 32 numbers of an operand."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import keras

from keras_mp.fp8.block_scales import BLOCK, SCALE_ROUNDING, Blocks, inverse_scale, quantize_matrix
from keras_mp.fp8.matrix import as_matrix, from_matrix
from keras_mp.fp8.roles import RoleFormats
from keras_mp.fp8.scaling_recipe import Quantized, Recipe
from keras_mp.precision.formats import E4M3


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
