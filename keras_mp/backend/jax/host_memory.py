"""Arrays that lie in the host's memory, and are on the device while they are used."""

from __future__ import annotations

from typing import Any

import jax
import keras
from jax.sharding import Sharding, SingleDeviceSharding

from keras_mp.backend.jax.devices import traced_chip
from keras_mp.backend.jax.transforms import barrier

ON_HOST = "pinned_host"


def check_host_memory() -> None:
    """Checks that a step can read and write arrays in the host's memory.

    Raises:
        ValueError: If it cannot.
    """
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if ON_HOST not in kinds:
        raise ValueError(
            f"state_memory='host' needs memory of kind {ON_HOST!r}, and {jax.devices()[0]} has only {', '.join(kinds)}"
        )


def keep_on_host(variable: keras.Variable) -> None:
    """Moves a variable to the host's memory, where whatever it is assigned outside of a step goes, too.

    Args:
        variable: A Keras variable, whose values a step then reads by `fetched` and assigns by `stored`.
    """
    layout = getattr(variable._layout, "backend_layout", variable._layout)
    if layout is None:
        layout = SingleDeviceSharding(jax.devices()[0])
    variable._layout = layout.with_memory_kind(ON_HOST)
    if variable._value is not None:
        variable._direct_assign(variable._value)


def host_sharding(variable: keras.Variable, sharding: Sharding | None) -> Sharding | None:
    """How a variable lies, of which the layout on devices is known: in the host's memory where it is kept there."""
    if getattr(variable._layout, "memory_kind", None) != ON_HOST:
        return sharding
    sharding = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return sharding.with_memory_kind(ON_HOST)


def fetched(array: Any, after: list[Any]) -> Any:
    """Copies an array from the host's memory to the device, in a step not before others are there."""
    if after and isinstance(array, jax.core.Tracer):
        array = barrier([array], after)[0]
    return jax.device_put(array, jax.memory.Space.Device)


def fetches_early() -> bool:
    """Whether what is traced is for a compiler that starts copies from the host early, and all at once.

    libtpu starts them as soon as their source is there, whatever `fetched` has them wait for. In a loop it cannot.
    """
    return traced_chip().platform == "tpu"


def stored(array: Any) -> Any:
    """Copies an array from the device to the host's memory."""
    return jax.device_put(array, jax.memory.Space.Host)
