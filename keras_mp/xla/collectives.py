"""The collectives of a compiled step: what devices send to each other, by kind and dtype."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from keras_mp.xla.hlo import Instruction, Module, Shape, long_name

# A TPU's compiler spreads a collective over several kernels, in each of which it stands once more, by one name.
_PART = re.compile(r'(chain_id|async_collective_name)="[^"]*"')
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind and dtype in a step.

    Args:
        kind: as XLA writes it, such as "all-gather".
        dtype: of the elements that are sent.
        count: how many arrays a step sends so.
        bytes: of the whole arrays, on one device: what an all-gather makes, what a reduce-scatter takes, what an
            all-reduce takes and makes. What crosses a link depends on how the slice is wired.
    """

    kind: str
    dtype: str
    count: int
    bytes: int


def collectives(module: Module) -> list[Collective]:
    """Lists the collectives of a compiled module, the largest first."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    seen: set[str] = set()
    for kernel, repeats in module.kernels():
        for instruction in module.inside(kernel):
            kind = _kind(instruction)
            part = _PART.search(instruction.attributes)
            if not kind or (part and part[0] in seen):
                continue
            seen.update([part[0]] if part else [])
            for shape in _sent(instruction, kind, module):
                counts[kind, shape.dtype] += repeats
                sizes[kind, shape.dtype] += repeats * shape.size
    listed = [Collective(kind, long_name(dtype), counts[kind, dtype], size) for (kind, dtype), size in sizes.items()]
    return sorted(listed, key=lambda collective: -collective.bytes)


def _kind(instruction: Instruction) -> str:
    """The kind of a collective, also of one that starts and ends apart; "" for other instructions."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def _sent(instruction: Instruction, kind: str, module: Module) -> list[Shape]:
    """The whole arrays: of the operands and the results of a collective, the larger."""
    inside = module.computations[instruction.computation]
    taken = [shape for name in instruction.operands if name in inside for shape in inside[name].shapes]
    made = list(instruction.shapes)
    if instruction.opcode.endswith("-start") and len(made) > len(taken):
        made = made[len(taken) : 2 * len(taken)]  # operands, results, and what the compiler keeps with them
    return taken if kind == "reduce-scatter" else made
