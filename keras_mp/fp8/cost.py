"""When 8 bits pay: FP8 by a chip's peak rates, INT8 by compiled cycles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from keras_mp.fp8.int8_products import Int8Scaling
from keras_mp.fp8.mxfp8 import MXFP8Scaling
from keras_mp.fp8.scaling_recipe import Recipe
from keras_mp.precision.chips import CHIPS, Chip, find_chip

# When FP8 pays: what a layer's three products and its quantization take at a chip's peak rates.

# Bytes of an element: of inputs and gradients, of the float32 master weights, of FP8.
_HALF, _MASTER, _FP8 = 2, 4, 1


class Cost(NamedTuple):
    """Seconds of one layer in one training step: an estimate.

    Attributes:
        bfloat16: in bfloat16, the cast of the kernel included.
        fp8: in FP8, quantization included.
    """

    bfloat16: float
    fp8: float

    @property
    def gain(self) -> float:
        """How many times as fast FP8 is."""
        return self.bfloat16 / self.fp8


def step_cost(rows: int, inputs: int, outputs: int, chip: Chip, recipe: Recipe) -> Cost:
    """Estimates forward and backward of one product from the chip's peak rates.

        product      = max(2 rows inputs outputs / rate, bytes of operands and result / bandwidth),  three of them
        bfloat16     = products + (read 4, write 2) of the kernel
        FP8          = products + quantization
        quantization = for x, w and g: read it for the amax, read it again, write 1
                       delayed scaling reads it once; rowwise scaling makes all of it twice, for different products;
                       MXFP8 reads it for two amaxes, and once more to write 1 for each of the two
                       where matrix units want the summed axis innermost: write 1 once more, transposed

    No kernel reaches a peak; what is left out of both sides leaves their ratio much as it is. For (8192, 4096, 16384)
    on an H200 it predicts 1.69 for current and 1.81 for delayed scaling, where Transformer Engine's documentation
    measured 1.58 and 1.69.

    Args:
        rows: of the inputs: batch times positions.
        inputs: features of a row.
        outputs: features of a row of the result.
        chip: one with FP8.
        recipe: the scaling recipe of the operands.

    Returns:
        Seconds for one of the chip's devices.
    """
    bandwidth = chip.bandwidth / chip.devices
    x, w, g = rows * inputs, inputs * outputs, rows * outputs

    def products(dtype: str, size: int) -> float:
        rate = chip.peak[dtype] / chip.devices
        forward, to_inputs = size * (x + w) + _HALF * g, size * (g + w) + _HALF * x
        to_kernel = size * (x + g) + _MASTER * w
        moved = (forward, to_inputs, to_kernel)
        return sum(max(2 * rows * inputs * outputs / rate, bytes_moved / bandwidth) for bytes_moved in moved)

    def quantized(elements: int, size: int) -> int:
        reads = 1 if recipe.history_length else 2
        if isinstance(recipe, MXFP8Scaling):
            return elements * (3 * size + 2 * _FP8)
        if recipe.per_row:
            return elements * 2 * (reads * size + _FP8)  # the second copy is the transposed one
        return elements * (reads * size + _FP8 * (2 if wants_transposed(chip) else 1))

    quantization = quantized(x, _HALF) + quantized(w, _MASTER) + quantized(g, _HALF)
    cast = w * (_MASTER + _HALF)
    return Cost(products("bfloat16", _HALF) + cast / bandwidth, products("fp8", _FP8) + quantization / bandwidth)


def wants_transposed(chip: Chip) -> bool:
    """Whether FP8 operands must have the summed axis innermost, so that each is needed in two layouts.

    So it is on Ada and Hopper (NVIDIA, cuBLAS documentation, cublasLtMatmul: "A must be transposed and B
    non-transposed (the TN format)"); not on Blackwell, nor on TPUs.
    """
    return chip.vendor == "nvidia" and chip.architecture in ("8.9", "9.0")


def chip_for(target: str, recipe: Recipe) -> Chip:
    """Looks up a chip that multiplies FP8, or MXFP8 for `MXFP8Scaling`.

    Raises:
        ValueError: there is no such chip, or it has no such units, names those that have; or the backend has no such
            product.
    """
    chip = find_chip(target)
    if isinstance(recipe, MXFP8Scaling):
        having = ", ".join(name for name, chip in CHIPS.items() if _multiplies_blocks(chip))
        if not _multiplies_blocks(chip):
            raise ValueError(
                f"target={target!r}: {chip.title} has no MXFP8 units, so MXFP8 never pays there. With: {having}"
            )
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"target={target!r}: Keras runs on TensorFlow, which has no MXFP8 product, so MXFP8 never pays. Set "
                "the environment variable KERAS_BACKEND to 'jax' before Keras is first imported"
            )
    if "fp8" not in chip.peak:
        having = ", ".join(name for name, chip in CHIPS.items() if "fp8" in chip.peak)
        raise ValueError(f"target={target!r}: {chip.title} has no FP8 units, so FP8 never pays there. With: {having}")
    return chip


def _multiplies_blocks(chip: Chip) -> bool:
    """Whether a chip multiplies MXFP8 operands: NVIDIA's GPUs from Blackwell on."""
    return chip.vendor == "nvidia" and "fp8" in chip.peak and int(chip.architecture.split(".")[0]) >= 10


def rows_of(layer: keras.layers.Layer, inputs: int, batch_size: int) -> int | None:
    """Counts the rows of a built layer's inputs: batch times positions.

    Args:
        layer: a built Dense or EinsumDense layer.
        inputs: features of a row.
        batch_size: what the first axis has, where it is not known.

    Returns:
        Their number, or None where another axis is not known.
    """
    shape = list(layer.get_build_config()["input_shape"])
    if shape and shape[0] is None:
        shape[0] = batch_size
    return None if None in shape else math.prod(shape) // inputs


# When INT8 pays: compiled cycles of a layer, forward and backward, from the tables of `benchmarks/int8_cycles.py`.


class CompiledCost(NamedTuple):
    """Million cycles of one layer in one training step, as the chip's compiler estimates them.

    Attributes:
        bfloat16: in bfloat16.
        int8: in INT8, quantization included.
        shape: rows, inputs and outputs of the layer that was compiled.
    """

    bfloat16: float
    int8: float
    shape: tuple[int, ...]

    @property
    def gain(self) -> float:
        """How many times as fast INT8 is."""
        return self.bfloat16 / self.int8


def compiled_cost(rows: int, inputs: int, outputs: int, target: str, recipe: Int8Scaling) -> CompiledCost | None:
    """Looks up the largest layer of the table that is no larger than another in rows, inputs and outputs.

    Args:
        rows: of the inputs: batch times positions.
        inputs: features of a row.
        outputs: features of a row of the result.
        target: a chip's name.
        recipe: the scaling recipe.

    Returns:
        Its cycles; None for a layer smaller than all of the table.

    Raises:
        ValueError: the table has no such chip, or not the recipe's way of scaling.
    """
    by_shape = CYCLES[_tabled_chip(target)]
    smaller = [shape for shape in by_shape if all(map(int.__le__, shape, (rows, inputs, outputs)))]
    return _cost(by_shape, max(smaller), tabled_name(recipe)) if smaller else None


def _tabled_chip(target: str) -> str:
    chip = find_chip(target)
    if chip.name not in CYCLES:
        raise ValueError(
            f"target={target!r}: there are no compiled cycles of INT8 for {chip.title}, so that its gain is not "
            f"predicted. With: {', '.join(CYCLES)}. Without a target, or with select, convert does not need them"
        )
    return chip.name


def _cost(by_shape: Mapping[Any, dict[str, float]], shape: tuple[int, ...], name: str) -> CompiledCost:
    cycles = by_shape[shape]
    if name not in cycles:
        raise ValueError(f"Int8Scaling, {name}, has no compiled cycles. There are some for: {', '.join(cycles)}")
    return CompiledCost(cycles["bfloat16"], cycles[name], shape)


def tabled_name(recipe: Int8Scaling) -> str:
    """The recipe's name in the table."""
    return recipe.scales + (", kernel gradient INT8" if recipe.kernel_gradient == "int8" else "")


# Million cycles of a layer by chip, by (rows, inputs, outputs), and by scaling recipe.
#
# Made by `KERAS_BACKEND=jax python benchmarks/int8_cycles.py --python`, with libtpu 0.0.42.1.

Shape = tuple[int, int, int]

# fmt: off
CYCLES: dict[str, dict[Shape, dict[str, float]]] = {
    "v5e": {
        (2048, 2048, 8192): {
            "bfloat16": 1.64,
            "delayed": 1.77,
            "static": 1.78,
            "current": 2.49,
            "delayed, kernel gradient INT8": 1.51,
            "static, kernel gradient INT8": 1.52,
        },
        (8192, 4096, 16384): {
            "bfloat16": 29.31,
            "delayed": 21.13,
            "static": 21.13,
            "current": 24.89,
            "delayed, kernel gradient INT8": 17.88,
            "static, kernel gradient INT8": 17.88,
        },
    },
    "v6e": {
        (2048, 2048, 8192): {
            "bfloat16": 0.57,
            "delayed": 0.67,
            "static": 0.78,
            "current": 1.11,
            "delayed, kernel gradient INT8": 0.72,
            "static, kernel gradient INT8": 0.79,
        },
        (8192, 4096, 16384): {
            "bfloat16": 8.45,
            "delayed": 8.81,
            "static": 8.82,
            "current": 11.27,
            "delayed, kernel gradient INT8": 8.04,
            "static, kernel gradient INT8": 8.05,
        },
    },
    "v7x": {
        (2048, 2048, 8192): {
            "bfloat16": 0.48,
            "delayed": 0.85,
            "static": 0.85,
            "current": 1.06,
            "delayed, kernel gradient INT8": 0.79,
            "static, kernel gradient INT8": 0.81,
        },
        (8192, 4096, 16384): {
            "bfloat16": 9.00,
            "delayed": 9.53,
            "static": 9.54,
            "current": 10.70,
            "delayed, kernel gradient INT8": 9.96,
            "static, kernel gradient INT8": 9.97,
        },
    },
}
