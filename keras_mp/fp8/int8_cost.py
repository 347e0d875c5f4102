"""When INT8 pays: compiled cycles of a layer, forward and backward, from the tables of `benchmarks/int8_cycles.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_mp.fp8.int8_cycles import CYCLES
from keras_mp.fp8.int8_scaling import Int8Scaling
from keras_mp.precision.chips import find_chip


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
