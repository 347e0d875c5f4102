"""The collectives of a compiled step: what devices send to each other, by kind, dtype and layer, and beside what."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from keras_mp.lowering import UNATTRIBUTED
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.hlo import KINDS, Instruction, Module, Shape, long_name

# A TPU's compiler spreads a collective over several kernels, in each of which it stands once more, by one name.
_PART = re.compile(r'(chain_id|async_collective_name)="[^"]*"')
# A TPU's compiler writes some reduce-scatters as a custom fusion: a pad, an all-reduce, and a slice of the result. The
# emitter behind it sends what a reduce-scatter does.
_SCATTERING_FUSION = re.compile(r'"emitter":"\w*AllReduceScatterFusion"|calls=%?all-reduce-scatter\b')
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,\s]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """A layer's collectives of one kind and dtype.

    Args:
        kind: the kind as XLA writes it, such as "all-gather".
        dtype: the dtype of the elements that are sent.
        group: the number of devices that take part in one together; 0 for permutes, in which each sends to one other.
        layer: path of the layer whose weights, gradients or activations are sent, or "unattributed".
        count: the number of arrays that a step sends so.
        bytes: the bytes of the whole arrays, on one device: what an all-gather makes, what a reduce-scatter takes, what
            the others take and make.
        wire: the bytes that one device sends, if the collectives run on a ring: of an array's bytes 2(n-1)/n in an
            all-reduce of n devices, (n-1)/n in an all-gather, reduce-scatter or all-to-all, and all in a permute or
            broadcast. With what the compiler pads an array by before it is sent.
        covered: the part of `wire` that collectives send beside which products run in the compiled order of kernels.
    """

    kind: str
    dtype: str
    group: int
    layer: str
    count: int
    bytes: int
    wire: int
    covered: int = 0


def collectives(
    module: Module,
    devices: int,
    layer_of: Callable[[Instruction, Instruction | None, int], str] = lambda collective, fusion, place: UNATTRIBUTED,
    products: Collection[str] = (),
) -> list[Collective]:
    """Lists a compiled module's collectives, most bytes sent first.

    Args:
        devices: the number of devices that run it: the group of a collective that names none.
        layer_of: a function that finds the layer of each, as `CollectiveLayers.of` does; by default all are
            unattributed.
        products: names of kernels that are products, besides those that contain a dot or a convolution.
    """
    beside = beside_products(module, products)
    counts: dict[tuple[str, str, int, str], int] = defaultdict(int)
    sizes: dict[tuple[str, str, int, str], int] = defaultdict(int)
    wires: dict[tuple[str, str, int, str], Fraction] = defaultdict(Fraction)
    covered: dict[tuple[str, str, int, str], Fraction] = defaultdict(Fraction)
    for sent, repeats in _sent(module):
        group = _group(sent, devices)
        key = (sent.kind, long_name(sent.whole.dtype), group, layer_of(sent.instruction, sent.fusion, sent.place))
        counts[key] += repeats
        sizes[key] += repeats * sent.whole.size
        wire = repeats * sent.padded.size * ring_share(sent.kind, group)
        wires[key] += wire
        covered[key] += wire if sent.kernel.name in beside else 0
    listed = [Collective(*key, counts[key], size, int(wires[key]), int(covered[key])) for key, size in sizes.items()]
    return sorted(listed, key=lambda collective: (-collective.wire, -collective.bytes))


def wire_of_kernels(module: Module, devices: int) -> dict[str, int]:
    """Bytes that a device sends, each time these instructions start."""
    wires: dict[str, Fraction] = defaultdict(Fraction)
    for sent, _ in _sent(module):
        wires[sent.kernel.name] += sent.padded.size * ring_share(sent.kind, _group(sent, devices))
    return {name: int(wire) for name, wire in wires.items()}


def _group(sent: _Sent, devices: int) -> int:
    return 0 if sent.kind == "collective-permute" else group_size(sent.instruction.attributes, devices)


def ring_share(kind: str, group: int) -> Fraction:
    """The part of an array that a ring's device sends."""
    if kind in ("collective-permute", "collective-broadcast"):
        return Fraction(1)
    share = Fraction(group - 1, group)
    return 2 * share if kind == "all-reduce" else share


def group_size(attributes: str, devices: int) -> int:
    """How many devices take part in a collective together.

    Args:
        attributes: the attributes of its line in the compiled text; the groups are listed, counted, or axes of a mesh
            there.
        devices: the number of all devices; all take part where no groups are named.
    """
    listed = _LISTED_GROUPS.search(attributes)
    if listed:
        return len(listed[1].split(","))
    counted = _COUNTED_GROUPS.search(attributes)
    if counted:
        return int(counted[1])
    mesh = _MESH_GROUPS.search(attributes)
    if not mesh:
        return devices
    axes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
    size = 1
    for name, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2]):
        size *= int(part) if part else axes[name]
    return size


class _Sent(NamedTuple):
    """One array of a collective: its size in the program, and its size as it is sent."""

    kind: str
    instruction: Instruction
    place: int
    whole: Shape
    padded: Shape
    fusion: Instruction | None
    kernel: Instruction


def _sent(module: Module) -> Iterator[tuple[_Sent, int]]:
    seen: set[str] = set()
    for kernel, repeats in module.kernels():
        for instruction, fusion in _with_fusion(kernel, None, module):
            kind = _kind(instruction)
            part = _PART.search(instruction.attributes)
            if not kind or (part and part[0] in seen):
                continue
            seen.update([part[0]] if part else [])
            padded = _arrays(instruction, kind, module)
            whole = padded
            if kind == "all-reduce" and fusion is not None and _SCATTERING_FUSION.search(fusion.attributes):
                kind = "reduce-scatter"
                whole = _unpadded(padded, module.shapes_of(fusion))
            for place, shapes in enumerate(zip(whole, padded, strict=True)):
                yield _Sent(kind, instruction, place, *shapes, fusion, kernel), repeats


def _with_fusion(
    instruction: Instruction, fusion: Instruction | None, module: Module
) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yields an instruction and all that is fused into it, each with the innermost fusion that it is in."""
    yield instruction, fusion
    for callee in instruction.callees if instruction.opcode in ("fusion", "async-start") else []:
        for inner in module.computations.get(callee, {}).values():
            yield from _with_fusion(inner, instruction if instruction.opcode == "fusion" else fusion, module)


def _kind(instruction: Instruction) -> str:
    """The kind of a collective, also of one that starts and ends apart; "" for other instructions."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def _arrays(instruction: Instruction, kind: str, module: Module) -> list[Shape]:
    """The whole arrays: of the operands and the results of a collective, the larger."""
    inside = module.computations[instruction.computation]
    taken = [shape for name in instruction.operands if name in inside for shape in inside[name].shapes]
    made = list(instruction.shapes)
    if instruction.opcode.endswith("-start") and len(made) > len(taken):
        made = made[len(taken) : 2 * len(taken)]  # operands, results, and what the compiler keeps with them
    return taken if kind == "reduce-scatter" else made


def _unpadded(padded: list[Shape], operands: list[Shape]) -> list[Shape]:
    """The arrays that a fusion takes and pads, in the dtype that they are sent in."""
    if len(operands) != len(padded):
        return padded
    return [Shape(sent.dtype, taken.dimensions) for sent, taken in zip(padded, operands, strict=True)]


# How many instructions back from a collective without a name the one that makes its array is looked for.
_DEPTH = 12


class CollectiveLayers:
    """Finds the layer of a collective.

    Its name tells it, as that of a product does. Where the compiler dropped the name, or made one collective of
    several, the layer is that of the instruction that makes the array; a product's is that of its row in the report.

    Args:
        products: the layers of its dots and convolutions, in the order in which it asks for them.
    """

    def __init__(self, step: CompiledStep, products: Iterable[str]) -> None:
        self._step, self._module = step, step.module
        self._products = {entry.op: layer for entry, layer in zip(step.asked.contractions, products, strict=True)}

    def of(self, collective: Instruction, fusion: Instruction | None, place: int) -> str:
        """The path of the layer of one array of a collective, or "unattributed".

        Args:
            fusion: the fusion that it is in, if any.
            place: the place of the array among those of the collective.
        """
        combined = len(collective.operands) > 1
        if not combined:
            for instruction in filter(None, (collective, fusion)):
                layer = self._step.layer(instruction)
                if layer != UNATTRIBUTED:
                    return layer
        reader = fusion or collective
        operands = reader.operands[place : place + 1] if combined else reader.operands
        return self._behind(reader.computation, operands)

    def _behind(self, computation: str, names: Sequence[str]) -> str:
        """The layer of the nearest of these instructions, and of those that they read, that tells one."""
        inside = self._module.computations[computation]
        seen = set(names)
        for _ in range(_DEPTH):
            behind: list[str] = []
            for instruction in (inside[name] for name in names if name in inside):
                if not any(shape.dimensions for shape in instruction.shapes):
                    continue  # a loss or a norm, which is no layer's
                maker = self._maker(instruction)
                product = self._product(maker)
                layer = self._step.layer(maker) if product is None else product
                if layer != UNATTRIBUTED:
                    return layer
                if product is None:  # a product's operands are of other layers
                    behind += [name for name in instruction.operands if name not in seen]
                    seen.update(instruction.operands)
            names = behind
        return UNATTRIBUTED

    def _product(self, instruction: Instruction) -> str | None:
        """The layer of the product that an instruction is, or that is fused into it; None where there is none."""
        for inner in self._module.inside(instruction):
            if inner.opcode in ("dot", "convolution", "custom-call") and inner.operation in self._products:
                return self._products[inner.operation]
        return None

    def _maker(self, instruction: Instruction) -> Instruction:
        """The instruction in a fusion of several results that makes the one that is taken out of it."""
        if instruction.opcode != "get-tuple-element":
            return instruction
        fusion = self._module.computations[instruction.computation].get(instruction.operands[0])
        fused = self._module.computations.get(fusion.callees[0], {}) if fusion and fusion.opcode == "fusion" else {}
        for root in fused.values():
            if root.root and root.opcode == "tuple" and instruction.index < len(root.operands):
                return fused[root.operands[instruction.index]]
        return instruction


# A TPU's compiler runs some collectives in steps: a kernel that starts, kernels that also compute, and one that ends.
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')
_PRODUCTS = ("dot", "convolution")


def beside_products(module: Module, products: Collection[str] = ()) -> set[str]:
    """Names kernels that start a collective or copy beside products.

    Beside a collective whose start and end stand apart runs what is between; beside one that a TPU runs in steps, what
    is in the same kernels as these.

    Args:
        module: the compiled module; its text has the order in which kernels are started.
        products: names of kernels that are products, besides those that contain a dot or a convolution.
    """
    covered: set[str] = set()
    for name in {kernel.computation for kernel, _ in module.kernels()}:
        covered |= _in_computation(module, list(module.computations[name].values()), products)
    return covered


def _in_computation(module: Module, order: list[Instruction], products: Collection[str]) -> set[str]:
    place = {instruction.name: index for index, instruction in enumerate(order)}
    multiplies = [_multiplies(module, instruction, products) for instruction in order]
    steps_of: dict[str, list[int]] = defaultdict(list)
    covered = set()
    for index, instruction in enumerate(order):
        if instruction.opcode.endswith("-done"):
            for operand in instruction.operands:
                start = place.get(operand, index)
                if order[start].opcode.endswith("-start") and any(multiplies[start + 1 : index]):
                    covered.add(operand)
        for chain in chains(module, instruction):
            steps_of[chain].append(index)
    return covered | {order[steps[0]].name for steps in steps_of.values() if any(multiplies[step] for step in steps)}


def _multiplies(module: Module, instruction: Instruction, products: Collection[str]) -> bool:
    if instruction.name in products:
        return True
    if instruction.opcode in ("while", "conditional", "call"):
        kernels = [kernel for callee in instruction.callees for kernel in module.computations.get(callee, {}).values()]
        return any(_multiplies(module, kernel, products) for kernel in kernels)
    return any(inner.opcode in _PRODUCTS for inner in module.inside(instruction))


def chains(module: Module, instruction: Instruction) -> set[str]:
    """Numbers of the collectives of which an instruction runs steps."""
    if instruction.opcode != "fusion":
        return set()
    matches = (_CHAIN.search(inner.attributes) for inner in module.inside(instruction))
    return {chain[1] for chain in matches if chain}
