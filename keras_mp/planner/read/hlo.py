"""Reads a compiled module: instructions, types, calls, and how often they run."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

# Bits an element, by XLA's names.
BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
    "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
}  # fmt: skip
# Keras's names of XLA's floating-point types.
NAMES = {
    "f4e2m1fn": "float4_e2m1fn",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
# XLA's and StableHLO's.
_INTEGERS = {"s8": "int8", "i8": "int8", "u8": "uint8", "ui8": "uint8", "s32": "int32", "i32": "int32"}
# They move no data of their own.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "copy-done", "async-done", "slice-done",
}  # fmt: skip
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"^}(?!})")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_FAST = "S(1)"  # the memory space of a TPU core's own memory, in a layout
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLEES = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ALIASED = re.compile(r"\{(\d+)\}: \((\d+),")
_NUMBERS = re.compile(r"keras_mp\.op\.(\d+)")


class Shape(NamedTuple):
    """An array: element type, dimensions, whether a core holds it."""

    dtype: str
    dimensions: tuple[int, ...]
    fast: bool = False

    @property
    def size(self) -> int:
        """Its bytes, without padding."""
        return math.ceil(math.prod(self.dimensions) * BITS.get(self.dtype, 0) / 8)


@dataclass(frozen=True)
class Instruction:
    """An instruction, whose attributes are read when asked for.

    Args:
        name: the name of the instruction in the module.
        opcode: the operation, such as "dot" or "fusion".
        shapes: the arrays that it makes, more than one for a tuple.
        operands: names of the instructions that it reads, in its computation.
        attributes: the rest of its line.
        computation: the computation that it is in.
        root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    computation: str
    root: bool

    @cached_property
    def operation_name(self) -> str:
        """The name that the instruction's metadata gives."""
        return _first_group(r'op_name="([^"]*)"', self.attributes) or ""

    @cached_property
    def operation(self) -> str:
        """The numbered operation that it comes from, as in `keras_mp.planner.read.asked`; "" if none."""
        return "/".join(_NUMBERS.findall(self.operation_name))

    @property
    def size(self) -> int:
        """The bytes that it makes."""
        return sum(shape.size for shape in self.shapes)

    @property
    def workspace(self) -> int:
        """The bytes of scratch memory that a call of NVIDIA's libraries sets aside: its last array, of bytes."""
        last = self.shapes[-1] if len(self.shapes) > 1 else Shape("", ())
        return last.size if last.dtype in ("s8", "u8") and self.target.startswith(("__cublas", "__cudnn")) else 0

    @cached_property
    def callees(self) -> list[str]:
        """The computations that run as part of it."""
        return re.findall(r"[\w.\-]+", " ".join(_CALLEES.findall(self.attributes)))

    @cached_property
    def index(self) -> int:
        """Which part of a tuple a get-tuple-element takes; the number of a parameter."""
        return int(_first_group(r"\bindex=(\d+)", self.attributes) or 0)

    @cached_property
    def target(self) -> str:
        """The library or kernel that a custom call or custom fusion names; "" for others."""
        return (
            _first_group(r'custom_call_target="([^"]*)"', self.attributes)
            or (_first_group(r'"kind":"(__[^"]*)"', self.attributes) if self.opcode == "fusion" else "")
            or ""
        )

    @cached_property
    def cycles(self) -> int:
        """The TPU compiler's estimate of what the instruction takes; 0 where it gives none."""
        cycles = int(_first_group(r'"estimated_cycles":"(\d+)"', self.attributes) or 0)
        return cycles if cycles < 2**62 else 0  # the largest number stands for "not known"

    @cached_property
    def trips(self) -> int:
        """How often a loop runs; 1 where that is not known."""
        return int(_first_group(r'"known_trip_count":\{"n":"(\d+)"', self.attributes) or 1)


@dataclass(frozen=True)
class Module:
    """A compiled module.

    Args:
        entry: the name of the computation that runs.
        computations: the instructions of each computation, in the order in which they run.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]

    @cached_property
    def in_loops(self) -> frozenset[str]:
        """The computations that loops run, and those that these call."""
        reached: set[str] = set()
        instructions = [one for inside in self.computations.values() for one in inside.values()]
        waiting = [callee for one in instructions if one.opcode == "while" for callee in one.callees]
        while waiting:
            callee = waiting.pop()
            if callee not in reached:
                reached.add(callee)
                waiting += [name for inner in self.computations.get(callee, {}).values() for name in inner.callees]
        return frozenset(reached)

    def shapes_of(self, instruction: Instruction) -> list[Shape]:
        """The first array of each of its operands."""
        inside = self.computations[instruction.computation]
        return [inside[name].shapes[0] for name in instruction.operands if name in inside and inside[name].shapes]

    def kernels(self, one_branch: bool = False) -> Iterator[tuple[Instruction, int]]:
        """Yields what is started on the chip, with how often: the entry's instructions, and those of loops in it.

        Args:
            one_branch: whether of a conditional only the branch that moves the most bytes is looked at; otherwise all
                of them.
        """
        yield from self._kernels(self.entry, 1, one_branch)

    def _kernels(self, computation: str, repeats: int, one_branch: bool) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(computation, {}).values():
            if instruction.opcode == "while":
                for callee in instruction.callees:
                    yield from self._kernels(callee, repeats * instruction.trips, one_branch)
            elif instruction.opcode in ("conditional", "call"):
                branches = [list(self._kernels(callee, repeats, one_branch)) for callee in instruction.callees]
                if one_branch and instruction.opcode == "conditional":
                    branches = [max(branches, key=self._moved, default=[])]
                for branch in branches:
                    yield from branch
            elif instruction.opcode not in FREE:
                yield instruction, repeats

    def _moved(self, kernels: list[tuple[Instruction, int]]) -> int:
        return sum(self.traffic(kernel) * repeats for kernel, repeats in kernels)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and all that is fused into it."""
        yield instruction
        for callee in instruction.callees if instruction.opcode in ("fusion", "async-start") else []:
            for inner in self.computations.get(callee, {}).values():
                yield from self.inside(inner)

    def traffic(self, kernel: Instruction) -> int:
        """The bytes that a kernel reads and writes, if each array crosses the memory once; scratch memory need not."""
        inside = self.computations[kernel.computation]
        read = {name for name in kernel.operands if name in inside}
        return kernel.size - kernel.workspace + sum(inside[name].size for name in read)


def is_work(instruction: Instruction, module: Module, products: Collection[str] = ()) -> bool:
    """Whether an instruction computes, or moves arrays on the chip.

    A collective is counted by the links that it crosses. A copy that starts and ends apart brings an array that the
    kernel which reads it counts: to count both would read the array twice.

    Args:
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
    """Bytes that a kernel moves, if each array crosses once.

    An array in the own memory of a TPU's core crosses only if a copy brought it there, which counts here. What a step
    of a collective hands on to the next does not cross. Of an array that a kernel in a loop reads or changes in part,
    only that part crosses.
    """
    inside = module.computations[kernel.computation]
    made, taken = _handed_on(kernel, module)
    written = sum(shape.size for place, shape in enumerate(kernel.shapes) if not shape.fast and place not in made)
    read = {name: place for place, name in enumerate(kernel.operands) if name in inside and place not in taken}
    moved = written - kernel.workspace
    for name, place in read.items():
        crossing = _crossing(inside[name], inside)
        once = crossing and kernel.operands.count(name) == 1
        part = _part(kernel, place, module) if once and kernel.computation in module.in_loops else None
        if part is None:
            moved += crossing
        else:
            # What a kernel changes in place is among its results, too: read and written in part.
            moved += min(part.read, crossing) - (max(crossing - part.changed, 0) if part.changed else 0)
    return max(moved, 0)


class _Part(NamedTuple):
    """The bytes of an array that a kernel reads, and those that it changes of the array in place; 0 for none."""

    read: int
    changed: int


_CHANGES = {"dynamic-update-slice": 1, "scatter": 2}  # by opcode: which operand holds the values


def _part(kernel: Instruction, place: int, module: Module) -> _Part | None:
    """The part of an operand that a kernel reads or changes; None where it reads the whole."""
    if kernel.opcode == "fusion":
        inside = module.computations.get(kernel.callees[0], {}) if kernel.callees else {}
        names = {one.name for one in inside.values() if one.opcode == "parameter" and one.index == place}
    else:
        inside, names = {kernel.name: kernel}, {kernel.operands[place]}
    read = changed = 0
    for user in inside.values():
        if not names & set(user.operands):
            continue
        if user.opcode in ("bitcast", "reshape") and kernel.opcode == "fusion":
            names |= {user.name}
            continue
        if user.operands[0] not in names or names & set(user.operands[1:]):
            return None
        if user.opcode in ("dynamic-slice", "gather"):
            read += user.size
        elif user.opcode in _CHANGES:
            owner = module.computations[user.computation]
            changed += owner[user.operands[_CHANGES[user.opcode]]].size
        else:
            return None
    return _Part(read + changed, changed) if read or changed else None


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


def long_name(dtype: str) -> str:
    """Keras's name of an element type, or else XLA's."""
    return NAMES.get(dtype) or _INTEGERS.get(dtype, dtype)


def parse(text: str) -> Module:
    """Parses the text that XLA prints of a compiled module.

    Raises:
        ValueError: If there is no module in the text.
    """
    entry = ""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    name = written = ""
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                name = head[2]
                current = computations[name] = {}
                written = ""
                if head[1]:
                    entry = name
        elif _END.match(line) or _LINE.match(line):
            if (instruction := _parse_line(written, name)) is not None:
                current[instruction.name] = instruction
            written = line
            if not _LINE.match(line):
                current = None
        else:  # an attribute with a line break, as the metadata of a kernel
            written += line
    if not entry:
        raise ValueError("the text holds no compiled module: it has no ENTRY computation")
    return Module(entry, computations)


def _parse_line(line: str, computation: str) -> Instruction | None:
    start = _LINE.match(line)
    if not start:
        return None
    place = start.end()
    end = _closing(line, place) + 1 if line[place] == "(" else line.index(" ", place)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    shapes = _shapes(line[start.end() : end])
    operands = (
        () if opcode[1] in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", line[opcode.end() : close]))
    )
    number = f"index={line[opcode.end() : close]}" if opcode[1] == "parameter" else ""
    return Instruction(start[2], opcode[1], shapes, operands, number + line[close + 1 :], computation, bool(start[1]))


def _closing(line: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        if line[place] == "(":
            depth += 1
        elif line[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    return len(line)


@lru_cache(4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type: a module writes the same few hundred types again and again."""
    return tuple(
        Shape(dtype, tuple(int(size.strip(" <=")) for size in dimensions.split(",") if size.strip()), _FAST in layout)
        for dtype, dimensions, layout in _SHAPE.findall(text)
    )


def _first_group(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
