"""A chip that is asked about: alone, or several of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_mp.precision.chips import Chip
from keras_mp.precision.hardware import Device, support
from keras_mp.xla.targets import Target, find_target

_POLICIES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16", "float32": "float32"}
_SEVERAL = re.compile(r"(.+?)\s*(?:x|-)\s*(\d+)$", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where a step is to run.

    Args:
        name: as it was asked for, such as "rtx4090x4".
        target: one chip.
        chips: how many share the step.
    """

    name: str
    target: Target
    chips: int = 1

    @property
    def chip(self) -> Chip:
        """The chip's row."""
        assert self.target.chip is not None
        return self.target.chip

    @property
    def devices(self) -> int:
        """How many devices share the step: of some TPUs a chip is two."""
        return self.chips * self.chip.devices if self.chips > 1 else 1

    @property
    def title(self) -> str:
        """The name that people use, with the number of chips."""
        return self.chip.title if self.chips == 1 else f"{self.chips} x {self.chip.title}"

    @property
    def capacity(self) -> int:
        """Memory of one device, in bytes."""
        return self.chip.memory_bytes // self.chip.devices

    @property
    def family(self) -> str:
        """What the compiler's result depends on; chips of one family share a compile.

        The memory of a step is the same on all GPUs of one compute capability; a test compares two.
        """
        return f"{self.target.platform} {self.chip.architecture}, {self.devices} devices"

    @property
    def policy(self) -> str:
        """The precision in which training pays on the chip: bfloat16 if it has it, else float16, else float32."""
        kind = "tpu" if self.chip.vendor == "google" else "gpu"
        device = Device(kind, self.chip.title, self.chip.architecture, self.chip)
        return next(policy for policy, dtype in _POLICIES.items() if support(dtype, device).ok)


def find_place(name: str) -> Place:
    """Reads a target: a chip's name, or with a number of chips, such as "rtx4090x4" or "v5e-8".

    Raises:
        ValueError: If there is no such chip or no such number of them; the message has the nearest names.
    """
    text = str(name).strip()
    try:
        target, chips = find_target(text), 1
    except ValueError:
        several = _SEVERAL.match(text)
        if several is None or int(several[2]) < 1:
            raise
        target, chips = find_target(several[1]), int(several[2])
    if target.chip is None:
        raise ValueError(f"targets has {name!r}, and its memory is not known: name a chip, such as 'h100'")
    return Place(text, target, chips)
