"""Counts the floating-point operations of a layer's call from its shapes; a multiply-add is two."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras.src.layers.convolutional.base_conv import BaseConv  # private: the classes have no public parent
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv

Shapes = list[tuple[int, ...]]


def flops_of(layer: Any, inputs: Shapes, outputs: Shapes, inner: dict[str, tuple[int, ...]]) -> int:
    """Counts the matrix products and convolutions of one call, padding counted as if it were data.

    Args:
        layer: the live layer.
        inputs: shapes of what went in.
        outputs: of what came out.
        inner: of tensors inside, by name.

    Returns:
        The count; 0 for a layer that multiplies no matrices, and for one whose products are those of its sublayers.
    """
    if "scores" in inner:  # scores, and their product with the values, which are as long as the keys here
        return (
            2 * 2 * math.prod(inner["scores"]) * int(layer._key_dim if hasattr(layer, "_key_dim") else layer.head_dim)
        )
    if not outputs:
        return 0
    kernel = _kernel_shape(layer)
    if isinstance(layer, (keras.layers.Dense, BaseConv)) and kernel:
        return 2 * math.prod(outputs[0]) * math.prod(kernel[:-1])
    if isinstance(layer, BaseDepthwiseConv) and kernel:
        return 2 * math.prod(outputs[0]) * math.prod(kernel[:-2])
    if isinstance(layer, BaseConvTranspose) and kernel and inputs:
        return 2 * math.prod(inputs[0]) * math.prod(kernel[:-1])
    if isinstance(layer, keras.layers.EinsumDense) and kernel:
        operands, result = layer.equation.replace(" ", "").split("->")
        summed = [size for label, size in zip(operands.split(",")[1], kernel, strict=False) if label not in result]
        return 2 * math.prod(outputs[0]) * math.prod(summed)
    if isinstance(layer, keras.layers.ReversibleEmbedding) and outputs[0][-1] == layer.input_dim and inputs:
        return 2 * math.prod(outputs[0]) * layer.output_dim  # the product of logits
    return 0


def _kernel_shape(layer: Any) -> tuple[int, ...]:
    kernel = getattr(layer, "kernel", None)
    return tuple(kernel.shape) if kernel is not None else ()
