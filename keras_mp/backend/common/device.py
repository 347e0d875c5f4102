"""What both backends say about a device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

_BEST_FIRST = ("tpu", "gpu", "cpu")
# That which `pip install "jax[cuda13]"` brought in November 2026: nvidia-cudnn-cu13 9.28.1.4 (jax-cuda13-plugin 0.10.2
# takes 9.12 up to 10). XLA leaves products that older ones lack, as block-scaled ones before 9.10, to other kernels.
CUDNN = (9, 28, 1)


class TracedChip(NamedTuple):
    """The chip that a step is traced for."""

    platform: str  # "cpu", "gpu" or "tpu"
    capability: float | None = None  # NVIDIA's compute capability, such as 9.0; None of others, and where not known
    kind: str = ""  # the name that the runtime gives it, such as "NVIDIA H100 80GB HBM3" or "TPU v5 lite"


_absent: ContextVar[TracedChip | None] = ContextVar("chip that is not there, and that a step is traced for")


@contextmanager
def absent_chip(chip: TracedChip) -> Iterator[None]:
    """Sets the chip of `chip_in_scope`; `traced_for` tells Keras, too."""
    token = _absent.set(chip)
    try:
        yield
    finally:
        _absent.reset(token)


def chip_in_scope() -> TracedChip | None:
    """Returns the scope's chip; None for this machine's."""
    return _absent.get(None)


def answered(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes a replacement that answers for the scope's chip.

    Args:
        answer: a function of the original, the chip and the arguments of a call.
    """

    def replaced(original: Any) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            chip = chip_in_scope()
            return original(*args, **kwargs) if chip is None else answer(original, chip, *args, **kwargs)

        return ask

    return replaced


class DeviceInfo(NamedTuple):
    """A device as the runtime sees it."""

    kind: str  # "cpu", "gpu" or "tpu"
    name: str  # the name that the runtime gives it, such as "NVIDIA H200" or "TPU v5 lite"; "" of a CPU
    architecture: str  # compute capability ("9.0"), LLVM target ("gfx942"), or "" where the runtime does not tell


def capability_of(architecture: str) -> float | None:
    """Reads NVIDIA's compute capability, "9.0"; None of "gfx942"."""
    return float(architecture) if architecture.replace(".", "", 1).isdigit() else None


def chip_of(device: DeviceInfo) -> TracedChip:
    """Describes a device as one to trace for."""
    return TracedChip(device.kind, capability_of(device.architecture), device.name)


def best_first(devices: Iterable[DeviceInfo]) -> list[DeviceInfo]:
    """Sorts devices: TPUs, then GPUs, then CPUs."""
    return sorted(devices, key=lambda device: _BEST_FIRST.index(device.kind))
