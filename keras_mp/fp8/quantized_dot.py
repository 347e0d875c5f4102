"""One product of two quantized tensors, divided by their scales."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.contraction import summed_axes
from keras_mp.fp8.scaling_recipe import Quantized


def quantized_dot(
    equation: str, left: Quantized, right: Quantized, dtype: str, role: str, *, path: str, precise: bool, apart: bool
) -> Any:
    """An einsum of two quantized tensors whose summed labels stand in both, divided by their scales.

    Args:
        equation: of a matrix product, without an ellipsis.
        left: with a scale of shape (), or one for each row.
        right: likewise.
        dtype: of the result.
        role: "forward", "input_gradient" or "kernel_gradient", which names the product in the compiled program.
        path: of the layer, for that name.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.

    Returns:
        A tensor as the equation says.
    """
    name = f"{path}/keras_mp.{role}"
    operands, result = equation.split("->")
    left_labels, right_labels = operands.split(",")
    axes = summed_axes(equation)
    kept = [
        [label for axis, label in enumerate(labels) if axis not in summed]
        for labels, summed in zip((left_labels, right_labels), axes, strict=True)
    ]

    def multiply(factor: Any, dtype: str) -> Any:
        lists = list(axes[0]), list(axes[1])
        return backend.scaled_dot(
            left.values, right.values, lists, factor, dtype, precise=precise, apart=apart, name=name
        )

    if len(left.scale.shape) == 0:
        out = multiply(1.0 / (left.scale * right.scale), dtype)
    else:
        rows = keras.ops.squeeze(1.0 / left.scale, axes[0])
        columns = keras.ops.squeeze(1.0 / right.scale, axes[1])
        out = multiply(keras.ops.ones(()), "float32")
        out = out * keras.ops.expand_dims(rows, [len(kept[0]) + i for i in range(len(kept[1]))])
        out = keras.ops.cast(out * columns, dtype)
    labels = kept[0] + kept[1]
    return out if labels == list(result) else keras.ops.transpose(out, [labels.index(label) for label in result])
