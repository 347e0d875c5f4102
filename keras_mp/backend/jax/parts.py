"""What a step on several devices has of variables while it is traced: the part of each device."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_mp.backend.jax.tensors import as_tensor

# The plans in force, each with the mesh that its axes belong to.
active: list[Any] = []
# Within a device's part of a step: of each variable that is split, by id, how the whole is made of the parts.
inside: list[dict[int, Any]] = []
# While a variable is read without gathering it.
reading_parts: list[bool] = []


def is_on_one_device() -> bool:
    """Whether what is traced now computes on one device: by itself, or as a device's part of a step."""
    distribution = keras.distribution.distribution()
    alone = distribution is None or math.prod(distribution.device_mesh.shape) == 1
    return bool(inside) or (alone and not active)


def part_of(variable: Any) -> tuple[Any, Any]:
    """Reads a variable without gathering it.

    Args:
        variable: a variable, or an array.

    Returns:
        This device's part of its value, and how the whole is made of the parts; where there are no parts, the whole and
        None.
    """
    part = inside[-1].get(id(variable)) if inside else None
    if part is None:
        return as_tensor(variable), None
    reading_parts.append(True)
    try:
        value = as_tensor(variable)
    finally:
        reading_parts.pop()
    return value, part if tuple(value.shape) != part.shape else None
