"""Which of Keras's layers add up many numbers in the dtype of their inputs: a sum that 16 bits cannot hold.

In float16 5,000 times 20 is infinite, and 3 added to 8,192 is lost; in bfloat16 1 added to 256 is. Where Keras itself
adds up in float32, as in `ops.mean`, or a matrix unit does, as in a product, nothing is listed here.
"""

from __future__ import annotations

import math
from typing import Any

import keras

FEW_TERMS = 16
"""So many numbers may be added up in 16 bits: rounded after each, the sum is off by 8 units in the last place at most,
and one of them alone has to be over 4,095 to make it infinite."""

AVERAGE_POOLING = (keras.layers.AveragePooling1D, keras.layers.AveragePooling2D, keras.layers.AveragePooling3D)
MERGING = (
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
# Newer than the oldest version of Keras.
ADAPTIVE_POOLING = tuple(
    getattr(keras.layers, name)
    for name in (f"AdaptiveAveragePooling{n}D" for n in (1, 2, 3))
    if hasattr(keras.layers, name)
)


def long_sum_of(layer: keras.Operation) -> str:
    """Says what a layer adds up in the dtype of its inputs, if those are more than a few numbers; empty otherwise."""
    if isinstance(layer, keras.layers.GlobalAveragePooling1D):
        return "the steps of a masked sequence"
    if isinstance(layer, keras.layers.Dot) and layer.normalize:
        return "the squares of the vectors that it normalizes"
    if isinstance(layer, AVERAGE_POOLING) and math.prod(layer.pool_size) > FEW_TERMS:
        return f"the {math.prod(layer.pool_size):,} values of a window"
    if isinstance(layer, ADAPTIVE_POOLING):
        return "the values of a window"
    if isinstance(layer, keras.layers.RepeatVector) and layer.n > FEW_TERMS:
        return f"the gradients of its {layer.n:,} copies"
    if isinstance(layer, (keras.layers.Add, keras.layers.Average)) and len(_input_shapes(layer)) > FEW_TERMS:
        return f"its {len(_input_shapes(layer)):,} inputs"
    if isinstance(layer, MERGING) and layer.built and _copies(layer) > FEW_TERMS:
        often = f"{_copies(layer):,.0f} times" if _copies(layer) < math.inf else "along an axis of unknown length"
        return f"the gradients of an input that it repeats {often}"
    if isinstance(layer, keras.layers.EinsumDense) and sums_one_operand(layer.equation):
        return "the axes of its inputs that its kernel does not have"
    return ""


def sums_one_operand(equation: str) -> bool:
    """Whether an einsum adds up an axis of one operand before the product, as "abc,cd->ad" does with b."""
    operands, out = equation.replace("...", "").replace(" ", "").split("->")
    left, right = operands.split(",")
    return bool((set(left) ^ set(right)) - set(out))


def _copies(layer: Any) -> float:
    """How often a layer that merges repeats the smallest of its inputs; infinite along an axis of unknown length."""
    shapes = _input_shapes(layer)
    # As Keras does, an input of lower rank is repeated along the axes after the batch's.
    rank = max(map(len, shapes), default=0)
    shapes = [(*shape[:1], *(1,) * (rank - len(shape)), *shape[1:]) for shape in shapes]
    merged = [max(math.inf if size is None else size for size in sizes) for sizes in zip(*shapes, strict=True)]
    return max(math.prod(to for size, to in zip(shape, merged, strict=True) if size == 1) for shape in shapes)


def _input_shapes(layer: Any) -> list[tuple[int | None, ...]]:
    # Private, as only the layer itself is told the shapes of its inputs.
    return list(next(iter((layer._build_shapes_dict or {}).values()), ()))
