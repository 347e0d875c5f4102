"""What a compiled step computes and moves, and how long that takes at the chip's rates: a bound, not a measurement."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keras_mp.precision.chips import Chip
from keras_mp.xla.collectives import KINDS, Collective
from keras_mp.xla.hlo import FREE, Instruction, Module
from keras_mp.xla.matmuls import Matmul

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


@dataclass(frozen=True)
class Roofline:
    """What the chip's rates allow at best, in seconds. An estimate: no kernel reaches either rate.

    Args:
        seconds: the larger of the two below.
        compute: all dots and convolutions that the step runs, at the peak rate of their operands' dtype.
        memory: the arrays that kernels read and write, each once, at the memory's bandwidth; without collectives.
        cycles: the TPU compiler's own estimates, added up; 0 where it gives none.
    """

    seconds: float
    compute: float
    memory: float
    cycles: int

    @property
    def bound(self) -> str:
        """What limits the step: "compute" or "memory"."""
        return "compute" if self.compute >= self.memory else "memory"


@dataclass(frozen=True)
class LinkTime:
    """How long a step's collectives take at the rate of the chip's links. An estimate: no collective reaches it.

    How much of it passes while the chip computes is decided when the step runs.

    Args:
        seconds: `wire` at `rate`.
        wire: the bytes that a device sends in a step, on a ring.
        rate: bytes per second that a device sends, over all of its links together.
        link: what they are, such as "NVLink 4".
        covered: of `wire`, the bytes of collectives beside which products run in the compiled order of kernels.
    """

    seconds: float
    wire: int
    rate: float
    link: str
    covered: int = 0


def rate(matmul: Matmul, chip: Chip) -> float:
    """The peak of a chip for the operands of a product as compiled, in operations per second."""
    return peak_of(matmul.compiled or matmul.asked, chip)


def peak_of(dtypes: Sequence[str], chip: Chip) -> float:
    """The peak of a chip for products of operands of these dtypes, in operations per second.

    TPUs multiply float32 operands as bfloat16 unless more is asked for; NVIDIA's since A100 as TensorFloat-32. INT8
    counts at the rate of 16 bits where the chip's own is not in the table: no chip with INT8 units falls below that.
    """
    peak = chip.peak
    if dtypes and all(dtype == "int8" for dtype in dtypes):
        return peak.get("int8") or peak.get("bfloat16") or peak.get("float16") or peak["float32"]
    if any(dtype.startswith("float8") for dtype in dtypes) and all(d.startswith("float8") for d in dtypes):
        return peak.get("fp8") or peak.get("bfloat16") or peak["float16"]
    if "float32" in dtypes:
        return peak.get("tfloat32") or peak.get("float32") or peak["bfloat16"]
    if "bfloat16" in dtypes:
        return peak.get("bfloat16") or peak["float32"]
    if "float16" in dtypes:
        return peak.get("float16") or peak["bfloat16"]
    return peak.get("float32") or peak["bfloat16"]


def seconds(matmul: Matmul, chip: Chip) -> float:
    """What a product takes at that peak."""
    return matmul.flops / (rate(matmul, chip) / chip.devices)


def estimate(matmuls: Sequence[Matmul], module: Module, chip: Chip) -> Roofline:
    """Adds up what the chip's rates allow.

    Args:
        matmuls: the step's dots and convolutions.
        module: the compiled step.
        chip: the chip; a device has its share of the rates.
    """
    # Of a conditional, such as a step that is skipped or not, one branch runs.
    kernels = list(module.kernels(one_branch=True))
    products = {matmul.runs for matmul in matmuls}
    run = products & {kernel.name for kernel, _ in kernels}
    compute = sum(seconds(matmul, chip) for matmul in matmuls if matmul.runs in run)
    working = [(kernel, repeats) for kernel, repeats in kernels if is_work(kernel, module, products)]
    moved = sum(moved_bytes(kernel, module) * repeats for kernel, repeats in working)
    memory = moved / (chip.bandwidth / chip.devices)
    cycles = sum(kernel.cycles * repeats for kernel, repeats in kernels)
    return Roofline(max(compute, memory), compute, memory, cycles)


def link_time(collectives: Sequence[Collective], chip: Chip) -> LinkTime | None:
    """How long collectives take at the rate of a chip's links; None where that is not known, or nothing is sent."""
    if chip.link is None or not collectives:
        return None
    wire, covered = (sum(getattr(collective, name) for collective in collectives) for name in ("wire", "covered"))
    bandwidth = chip.link.bandwidth / chip.devices
    return LinkTime(wire / bandwidth, wire, bandwidth, chip.link.name, covered)
