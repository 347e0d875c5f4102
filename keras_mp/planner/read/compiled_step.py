"""A step that a chip's compiler compiled: what was asked, what was made of it, each read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_mp.lowering import Lowered, call_of
from keras_mp.planner.chips.targets import Target
from keras_mp.planner.read.asked import Asked
from keras_mp.planner.read.compiler_memory import Refusal
from keras_mp.planner.read.hlo import Instruction, Module


@dataclass(frozen=True)
class CompiledStep:
    """A step, and what a target's compiler made of it.

    Products, memory, collectives, casts and times are functions of it.

    Args:
        lowered: the step.
        target: the target that it was compiled for.
        asked: the operations that the lowered step asks for.
        module: the compiled module; without an instruction where it was refused.
        statistics: the compiler's own statistics of the memory, in bytes; empty where it was refused.
        flags: the options of the compiler, where they are not its own.
        versions: the versions of the packages that compiled.
        seconds: the seconds that the compiler took, now or when the result that was kept was made.
        log: the file with all that the compiler printed, beside the compiled module.
        refused: the compiler's refusal of a step that is larger than the chip's memory; None where it compiled.
        kept: whether an earlier call had compiled it.
    """

    lowered: Lowered
    target: Target
    asked: Asked
    module: Module
    statistics: Mapping[str, int]
    flags: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    log: str
    refused: Refusal | None = None
    kept: bool = False

    def name(self, instruction: Instruction) -> str:
        """The name, before operations were numbered, of what a compiled instruction comes from."""
        return f"{instruction.operation_name}/{self.asked.full_name(instruction.operation)}"

    def layer(self, instruction: Instruction) -> str:
        """The path of the layer whose call a compiled instruction comes from, or "unattributed"."""
        return self.lowered.layer(call_of(self.name(instruction)))
