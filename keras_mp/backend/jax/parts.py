"""What a step on several devices has of variables while it is traced: the part of each device."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from keras_mp.backend.jax.tensors import as_tensor

# The plans in force, each with the mesh that its axes belong to.
active: list[Any] = []
# Within a device's part of a step: of each variable that is split, by id, how the whole is made of the parts.
inside: list[dict[int, Any]] = []
# While a variable is read without gathering it.
reading_parts: list[bool] = []


class Division(NamedTuple):
    """How the compiler divides what is traced now among devices.

    Attributes:
        mesh: JAX's mesh.
        batch: the axis of the mesh that divides the rows of a batch.
        others: the other axes of the mesh that have several devices; they divide weights.
    """

    mesh: Any
    batch: str
    others: tuple[str, ...]


def division() -> Division | None:
    """Returns how the compiler divides what is traced now.

    None on one device, or in a device's part of a step.
    """
    distribution = keras.distribution.distribution()
    if inside or not (active or distribution):
        return None
    mesh = active[-1].mesh if active else distribution.device_mesh.backend_mesh
    batch = distribution.batch_dim_name if distribution else mesh.axis_names[0]
    several = [name for name, size in mesh.shape.items() if size > 1]
    return Division(mesh, batch, tuple(name for name in several if name != batch)) if several else None


def is_on_one_device() -> bool:
    """Tells whether what is traced now computes on one device."""
    return division() is None


def part_of(variable: Any) -> tuple[Any, Any]:
    """Reads a variable, or an array, without gathering it.

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
