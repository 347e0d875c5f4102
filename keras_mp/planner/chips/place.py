"""A chip that is asked about: alone, or several of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import keras

from keras_mp.lowering import Plan, TracedChip, plan_of, policy_on, traced
from keras_mp.planner.chips.targets import HOST_TITLE, Target, find_target, is_host, missing_compiler
from keras_mp.precision.chips import Chip, parse_target


@dataclass(frozen=True)
class Place:
    """Where a step is to run.

    Args:
        name: the name as it was asked for, such as "rtx4090x4".
        chip: the row of the chip in the table of chips.
        chips: the number of chips that share the step.
        strategy: the way in which they share it, where that was asked for.
    """

    name: str
    chip: Chip = field(hash=False)  # its rates are a mapping
    chips: int = 1
    strategy: str = ""

    @property
    def platform(self) -> str:
        """The name that its compiler has in JAX: "cuda" or "tpu"."""
        return "tpu" if self.chip.vendor == "google" else "cuda"

    @property
    def traced(self) -> TracedChip:
        """The chip that a step is traced for."""
        return traced(self.chip)

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
        return self.chip.device_bytes

    @property
    def family(self) -> tuple[str, int]:
        """Chips of one family may share a compile: the architecture, and the number of devices."""
        return f"{self.chip.vendor} {self.chip.architecture}", self.devices

    @property
    def strategies(self) -> tuple[str, ...]:
        """How the devices can share the step, the simplest first."""
        if self.devices == 1:
            return ("",)
        return (self.strategy,) if self.strategy else ("data", "fully_sharded")

    def plan(self, strategy: str) -> Plan | None:
        """The plan of a strategy; None on one device."""
        if not strategy:
            return None
        try:
            topology = self.target.topology
        except ValueError:  # no compiler takes it: then shapes alone are looked at
            topology = ""
        return plan_of(strategy, self.devices, topology)

    @property
    def target(self) -> Target:
        """What to compile for.

        Raises:
            ValueError: If no compiler that can be installed takes the chip, or as many of it.
        """
        target = find_target(self.chip.name if self.chips == 1 else f"{self.chip.name}x{self.chips}")
        return replace(target, chip=self.chip)

    @property
    def obstacle(self) -> str:
        """Why no step can be compiled for it here; "" where one can."""
        if self.devices > 1 and keras.backend.backend() != "jax":
            return "A step on several devices is compiled on JAX only: KERAS_BACKEND=jax."
        if self.chip.compiler is None:
            return f"No compiler that can be installed takes {self.chip.title}."
        try:
            return missing_compiler(self.target)
        except ValueError as error:
            return f"A step on {self.title} cannot be compiled: {error}."

    @property
    def policy(self) -> str:
        """The policy in which training pays on the chip."""
        return policy_on(self.chip)


def find_place(name: str, strategy: str = "") -> Place:
    """Reads a target: a chip, or a number of chips.

    Args:
        name: the target.
        strategy: the way in which several devices share the step; "" for any.

    Raises:
        ValueError: If there is no such chip or no such number of it; the message has the nearest names.
    """
    if is_host(str(name)):
        raise ValueError(
            f"target={name!r}: how much memory this machine leaves a program is not known. Name chips "
            f"(`keras-mp doctor --chips` lists them), or ask inspect what a step takes on {HOST_TITLE}"
        )
    return Place(str(name).strip(), *parse_target(str(name)), strategy)
