"""What both backends say about a device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_BEST_FIRST = ("tpu", "gpu", "cpu")
_traced_for: ContextVar[str | None] = ContextVar("platform that a step is traced for", default=None)


@contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """A scope in which a step is traced for a platform, "cpu", "cuda" or "tpu", that need not be this machine's."""
    token = _traced_for.set(platform)
    try:
        yield
    finally:
        _traced_for.reset(token)


def platform_traced_for() -> str | None:
    """Returns the platform of the scope, or None: then a step is for this machine."""
    return _traced_for.get()


class DeviceInfo(NamedTuple):
    """A device as the runtime sees it.

    Args:
        kind: "cpu", "gpu" or "tpu".
        name: The name that the runtime gives it, such as "NVIDIA H200", "TPU v5 lite" or "AMD EPYC".
        architecture: Compute capability ("9.0"), LLVM target ("gfx942"), or "" where the runtime does not tell.
    """

    kind: str
    name: str
    architecture: str


def best_first(devices: Iterable[DeviceInfo]) -> list[DeviceInfo]:
    """Sorts devices by kind: TPUs, then GPUs, then CPUs; otherwise the order stays."""
    return sorted(devices, key=lambda device: _BEST_FIRST.index(device.kind))
