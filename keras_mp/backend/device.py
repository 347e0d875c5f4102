"""What both backends say about a device."""

from collections.abc import Iterable
from typing import NamedTuple

_BEST_FIRST = ("tpu", "gpu", "cpu")


class DeviceInfo(NamedTuple):
    """A device as the runtime sees it.

    Args:
        kind: "cpu", "gpu" or "tpu".
        name: What the runtime calls it, such as "NVIDIA H200", "TPU v5 lite" or "AMD EPYC".
        architecture: Compute capability ("9.0"), LLVM target ("gfx942"), or "" where the runtime does not tell.
    """

    kind: str
    name: str
    architecture: str


def best_first(devices: Iterable[DeviceInfo]) -> list[DeviceInfo]:
    """Sorts devices by kind: TPUs, then GPUs, then CPUs; otherwise the order stays."""
    return sorted(devices, key=lambda device: _BEST_FIRST.index(device.kind))
