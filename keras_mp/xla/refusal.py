"""A step that the compiler refuses because it is larger than the chip's memory: what its message says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# libtpu's. With the arguments, although it speaks of temporaries: the sum of both, where both are known, is the figure.
_OUT_OF_MEMORY = re.compile(
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"
    r"|Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"
)


@dataclass(frozen=True)
class Refusal:
    """What the compiler says.

    Args:
        message: the part of its message that names the memory.
        needed: bytes of the step on one device, rounded by the compiler to a hundredth of its unit.
        available: bytes that the compiler leaves a program on one device; the runtime has the rest.
    """

    message: str
    needed: int
    available: int


def refusal_in(text: str) -> Refusal | None:
    """Finds the refusal in what a compiler printed; None where it failed for another reason."""
    match = _OUT_OF_MEMORY.search(text)
    if match is None:
        return None
    numbers = [group for group in match.groups() if group is not None]
    needed, available = (int(float(numbers[place]) * _UNITS[numbers[place + 1]]) for place in (0, 2))
    return Refusal(match[0], needed, available)
