"""Kernels of which each device has a part: a part is scaled as the whole would be, and what is gathered are its codes.

A part comes from `backend.part_of`. Where a kernel is whole it is None, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.scaling_recipe import Quantized, Recipe

_scaled: list[Any] = []


def read_kernel(variable: Any, recipe: Recipe) -> tuple[Any, Any]:
    """The value of a kernel and None, or this device's part of it and how the whole is made.

    Args:
        variable: the kernel.
        recipe: one that cannot scale a part gets the whole, gathered as that of any layer.
    """
    return backend.part_of(variable) if recipe.takes_parts else (backend.as_tensor(variable), None)


@contextmanager
def scaling(part: Any) -> Iterator[None]:
    """Within it a scaling recipe quantizes a part of a tensor."""
    _scaled.append(part)
    try:
        yield
    finally:
        _scaled.pop()


def over_parts(amax: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude of a whole tensor, from that of the part that is being quantized.

    Args:
        amax: float32, the largest magnitude along some axes.
        axes: these; None for all.
    """
    part = _scaled[-1] if _scaled else None
    return amax if part is None or not _lies_in(part, axes) else part.largest(amax)


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
    if len(scale.shape) and not _lies_in(part, axes):
        scale = part.joined(scale)
    return Quantized(part.joined(quantized.values), scale)


def sum_gradients(gradient: Any, part: Any) -> Any:
    """The gradient of a kernel, or this device's part of the sum over the devices."""
    return gradient if part is None else part.of_sum(gradient)


def whole_shape(kernel: Any, part: Any) -> tuple[Any, ...]:
    """The shape of a kernel of which this may be a part."""
    return tuple(keras.ops.shape(kernel)) if part is None else part.shape


def _lies_in(part: Any, axes: tuple[int, ...] | None) -> bool:
    return axes is None or part.axis in [axis % len(part.shape) for axis in axes]
