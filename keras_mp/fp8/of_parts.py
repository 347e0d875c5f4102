"""Kernels of which each device has a part: a part is scaled as the whole would be, and what is gathered are its codes.

A part comes from `backend.part_of`. Where a kernel is whole it is None, and nothing here does anything.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.scaling_recipe import Quantized, Recipe
from keras_mp.fp8.whole_amax import lies_in


def read_kernel(variable: Any, recipe: Recipe) -> tuple[Any, Any]:
    """The value of a kernel and None, or this device's part of it and how the whole is made.

    Args:
        variable: the kernel.
        recipe: one that cannot scale a part gets the whole, gathered as that of any layer.
    """
    return backend.part_of(variable) if recipe.takes_parts else (backend.as_tensor(variable), None)


def join(quantized: Quantized, part: Any, axes: tuple[int, ...] | None = None) -> Quantized:
    """Gathers a tensor of which a part was quantized.

    Args:
        quantized: the part's codes and scale.
        part: how the whole is made; None where it is the whole.
        axes: along which there is one scale; None for all.
    """
    if part is None:
        return quantized
    scale = quantized.scale
    if len(scale.shape) and not lies_in(part, axes):
        scale = part.joined(scale)
    return Quantized(part.joined(quantized.values), scale)


def sum_gradients(gradient: Any, part: Any) -> Any:
    """The gradient of a kernel, or this device's part of the sum over the devices."""
    return gradient if part is None else part.of_sum(gradient)


def whole_shape(kernel: Any, part: Any) -> tuple[Any, ...]:
    """The shape of a kernel of which this may be a part."""
    return tuple(keras.ops.shape(kernel)) if part is None else part.shape
