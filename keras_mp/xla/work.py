"""What a compiled step computes and moves within a chip: the kernels that count, and the bytes that each moves."""

from __future__ import annotations

import re
from collections.abc import Collection

from keras_mp.xla.collectives import KINDS
from keras_mp.xla.hlo import FREE, Instruction, Module

_ALIASED = re.compile(r"\{(\d+)\}: \((\d+),")


def is_work(instruction: Instruction, module: Module, products: Collection[str] = ()) -> bool:
    """Whether an instruction is a kernel that computes, or moves arrays within the chip.

    A collective is counted by the links that it crosses. A copy that starts and ends apart brings an array that the
    kernel which reads it counts: to count both would read the array twice.

    Args:
        instruction: any of the module.
        module: the compiled step.
        products: names of kernels that are products, which count however they are started.
    """
    if instruction.name in products:
        return True
    opcode = instruction.opcode
    if opcode in FREE or opcode in KINDS or opcode.endswith(("-start", "-done")):
        return False
    return not _is_transfer(instruction, module)


def _is_transfer(instruction: Instruction, module: Module) -> bool:
    """Whether a fusion is the first or the last step of a collective that a TPU runs in steps, and nothing else."""
    if instruction.opcode != "fusion":
        return False
    inside = {inner.opcode for inner in module.inside(instruction) if inner is not instruction} - FREE
    return bool(inside) and inside <= set(KINDS)


def moved_bytes(kernel: Instruction, module: Module) -> int:
    """The bytes that a kernel moves between the chip's memory and a core, if each array crosses once.

    An array in the own memory of a TPU's core crosses only if a copy brought it there, which counts here. What a step
    of a collective hands on to the next does not cross.
    """
    inside = module.computations[kernel.computation]
    made, taken = _handed_on(kernel, module)
    written = sum(shape.size for place, shape in enumerate(kernel.shapes) if not shape.fast and place not in made)
    read = {name for place, name in enumerate(kernel.operands) if name in inside and place not in taken}
    return written - kernel.workspace + sum(_crossing(inside[name], inside) for name in read)


def _crossing(array: Instruction, inside: dict[str, Instruction]) -> int:
    source = array
    while source.opcode == "bitcast" and source.operands and source.operands[0] in inside:
        source = inside[source.operands[0]]
    if source.opcode.endswith("-done"):
        return array.size
    return sum(shape.size for shape in array.shapes if not shape.fast)


def _handed_on(kernel: Instruction, module: Module) -> tuple[set[int], set[int]]:
    """Places among the results, and among the operands, of what a step of a collective hands on to the next."""
    if kernel.opcode != "fusion" or not any(inner.opcode in KINDS for inner in module.inside(kernel)):
        return set(), set()
    _, _, aliased = kernel.attributes.partition("output_to_operand_aliasing={")
    pairs = _ALIASED.findall(aliased.partition("}}")[0])
    return {int(made) for made, _ in pairs}, {int(taken) for _, taken in pairs}
