"""How long a compiled step takes: its kernels one after another, and the collectives that they do not cover.

The constants of a chip's generation are fitted by `benchmarks/planner/fit_efficiency.py` to published measurements of
matrix products, of convolutions, of memory bandwidth and of collectives, which are listed with their sources in
`benchmarks/planner/efficiency_tables.json`. No training step is among them; how far published steps were from their
predicted time is below.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from keras_mp.planner.read.collectives import chains, wire_of_kernels
from keras_mp.planner.read.hlo import Instruction, Module, is_work, moved_bytes
from keras_mp.planner.read.matmuls import Matmul, peak_of, seconds
from keras_mp.planner.time.arithmetic import arithmetic_seconds
from keras_mp.precision.chips import Chip


class Efficiency(NamedTuple):
    """What kernels reach.

    Args:
        products: the share of the peak that large products reach, by the bits of an operand (32: TF32 where the chip
            has it); of others, as with 16 bits.
        product_stream: the share of the memory's bandwidth in products that it limits; of a TPU that of copies, which
            bring its operands, too.
        product_start: the seconds that the smallest product takes.
        stream: the share of the memory's bandwidth in all other kernels, whose arithmetic XLA's table of cycles gives.
        start: the seconds that the smallest of all other kernels takes.
        convolution: the rate of large convolutions, as a share of that of large products of the same operands. On
            NVIDIA's GPUs of those whose arrays have channels first; no table has channels last, which run as products.
        fill: the bytes of a product, if it has so many, that cross at the full bandwidth while nothing is computed: a
            TPU's first tiles come from the memory before it multiplies, and its last results leave after.
    """

    products: Mapping[int, float]
    product_stream: float
    product_start: float
    stream: float
    start: float
    convolution: float
    fill: float = 0.0


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        "7.0": Efficiency({16: 0.827, 32: 0.862}, 0.921, 1.55e-05, 0.912, 5.02e-06, 0.587),
        "7.5": Efficiency({16: 0.669, 32: 0.515}, 0.994, 2.29e-05, 0.763, 5.02e-06, 0.54),
        "8": Efficiency({16: 0.73, 32: 0.715}, 0.921, 1.41e-05, 0.861, 5.02e-06, 0.587),
        "9": Efficiency({8: 0.722, 16: 0.818, 32: 0.705}, 0.944, 6.12e-06, 0.828, 5.02e-06, 0.587),
        "10": Efficiency({8: 0.697, 16: 0.687, 32: 0.749}, 0.881, 4.87e-06, 0.912, 5.02e-06, 0.587),
        "v7x": Efficiency({16: 0.828}, 0.869, 1.57e-06, 0.869, 1.6e-06, 1.0, 1.52e7),
        "v6e": Efficiency({16: 0.931}, 0.858, 1.57e-06, 0.858, 1.6e-06, 1.0, 1.52e7),
    }
)


class Links(NamedTuple):
    """What collectives reach, of which each device sends as much as on a ring.

    Args:
        share: the share of the links' bandwidth.
        start: the seconds that the smallest takes.
    """

    share: float = 1.0
    start: float = 0.0


# By the vendor of the chip; other links run at their peak: there is no table of theirs.
LINKS: Mapping[str, Links] = MappingProxyType({"nvidia": Links(0.766, 3.72e-05)})

# How many of the cycles that libtpu estimates pass in a second: of v6e and v7x by the tables, of which libtpu compiled
# the products; of v5e, for which there is none, 197 TFLOP/s over 4 matrix units of 128 x 128.
CYCLES_A_SECOND: Mapping[str, float] = MappingProxyType({"v5e": 1.5e9, "v6e": 2.24e9, "v7x": 2.16e9})


# The side of a TPU's matrix unit: `mxu_column_size` of jax/_src/pallas/mosaic/tpu_info.py, of v6e also Google's page of
# the chip. To it all sizes of a product are padded: github.com/jax-ml/scaling-book, tpus.md.
SIDES: Mapping[str, int] = MappingProxyType({"v6e": 256, "v7x": 256})
SIDE = 128


# The rate of cuDNN's attention as a share of that of large products. On an H100, of 128 features and 4,096 to 16,384
# tokens, it reaches 518 to 609 TFLOP/s forward and 499 to 518 backward: figures 5 and 6 of FlashAttention-3
# (arXiv:2407.08608; read in a transcription), which is 0.52 of the peak where products reach 0.82. Of Splash on TPUs
# there is no table.
ATTENTION = 0.64


def generation_of(chip: Chip) -> str:
    """The key in `EFFICIENCIES`; a generation without a table of its own takes the nearest's."""
    if chip.vendor == "google":
        return "v7x" if chip.name == "v7x" else "v6e"
    major, _, minor = chip.architecture.partition(".")
    if major == "7":
        return f"7.{minor}"
    return {"8": "8", "9": "9"}.get(major, "10")


def computing_seconds(flops: float, peak: float, bits: int, chip: Chip, of: Efficiency, kind: str = "dot") -> float:
    """What the operations of a large product or convolution take where nothing else limits it.

    Args:
        flops: the floating-point operations.
        peak: the peak rate of the chip for these operands, in operations per second.
        bits: the bits of an operand.
        chip: the chip; a device has its share of the rates.
        of: the shares of these rates that kernels reach.
        kind: "dot", "convolution" or "kernel".
    """
    share = of.products[bits if bits in of.products else 16] * (of.convolution if kind == "convolution" else 1)
    if kind == "kernel" and chip.vendor == "nvidia":
        share *= ATTENTION
    return flops / (peak / chip.devices * share)


def product_seconds(computing: float, moved: float, chip: Chip, of: Efficiency) -> float:
    """What a matrix product or convolution takes.

    Args:
        computing: the seconds that its operations take, from `computing_seconds`.
        moved: the bytes that it reads and writes.
        chip: the chip; a device has its share of the rates.
        of: the shares of these rates that kernels reach.
    """
    bandwidth = chip.bandwidth / chip.devices
    moving, filling = moved / (bandwidth * of.product_stream), min(moved, of.fill) / bandwidth
    # Between the two limits, a product takes longer than either alone: the tables follow a sum of squares.
    return of.product_start + filling + (computing**2 + moving**2) ** 0.5


def link_seconds(wire: float, chip: Chip, of: Links) -> float:
    """What a collective takes by the bytes that a device sends on a ring; 0 where it sends none, or has no links."""
    if not wire or chip.link is None:
        return 0.0
    return of.start + wire / (chip.link.bandwidth / chip.devices * of.share)


def padded(matmul: Matmul, chip: Chip) -> float:
    """How many times its own operations a product takes on a TPU, which fills all rows and columns of a matrix unit.

    A product with one row or one column is a sum of products to XLA, which vector units compute.
    """
    rows, _, columns = matmul.sizes
    if chip.vendor != "google" or matmul.kind == "convolution" or 1 in (rows, columns):
        return 1.0
    side = SIDES.get(chip.name, SIDE)
    return math.prod(math.ceil(size / side) * side / size for size in matmul.sizes if size)


def transfer_seconds(moved: float, chip: Chip, of: Efficiency, computing: float = 0.0) -> float:
    """What any other kernel takes, by the bytes that it reads and writes, and the seconds of its arithmetic."""
    moving = moved / (chip.bandwidth / chip.devices * of.stream)
    return of.start + (computing**2 + moving**2) ** 0.5


_CHANNELS_FIRST = re.compile(r"dim_labels=bf\d")
_BITS = {"float8": 8, "int8": 8, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class StepTime:
    """A prediction of what a step takes, in seconds; `docs/tables/predictions.md` compares such with published runs.

    Args:
        products: kernels that contain a dot or a convolution.
        other: all other kernels.
        uncovered: collectives, as far as no kernel runs beside them in the compiled order.
        kernels: the number of kernels that a step starts.
        cycles: the whole step, in seconds, if each kernel takes the cycles that a TPU's compiler estimates for it; 0
            where it gives none, or no table says how many pass in a second.
    """

    products: float
    other: float
    uncovered: float
    kernels: float
    cycles: float = 0.0

    @property
    def seconds(self) -> float:
        """Products, other kernels and uncovered collectives together."""
        return self.products + self.other + self.uncovered


def step_time(
    matmuls: Sequence[Matmul], module: Module, chip: Chip, devices: int = 1, efficiency: Efficiency | None = None
) -> StepTime:
    """Predicts what a step takes.

    A product takes what its size, its operands' dtype and the chip's generation allow; another kernel, what the bytes
    allow that it moves, and on NVIDIA's GPUs its arithmetic. A collective that starts and ends apart, or runs in steps,
    runs beside the kernels between. The time is never below the bound of `keras_mp.planner.time.estimate.estimate`:
    both count the same kernels.

    Args:
        matmuls: the step's dots and convolutions, joined with what was compiled.
        module: the compiled step.
        chip: the chip; a device has its share of the rates.
        devices: the number of devices that share the step.
        efficiency: the shares of the chip's rates that kernels reach; by default the constants of its generation.
    """
    wires = wire_of_kernels(module, devices) if devices > 1 else {}
    kernels: dict[str, list[Matmul]] = defaultdict(list)
    for matmul in matmuls:
        if matmul.runs:
            kernels[matmul.runs].append(matmul)
    # By the names of kernels, the collectives of which they run a step.
    steps = {kernel.name: chains(module, kernel) for kernel, _ in module.kernels()} if wires else {}
    clock = _Clock(module, chip, efficiency or EFFICIENCIES[generation_of(chip)], wires, steps, kernels)
    clock.run(module.entry, 1)
    in_cycles = 0.0
    if chip.name in CYCLES_A_SECOND and any(kernel.cycles for kernel, _ in module.kernels()):
        by_cycles = _Clock(module, chip, clock.efficiency, wires, steps, kernels, CYCLES_A_SECOND[chip.name])
        by_cycles.run(module.entry, 1)
        in_cycles = by_cycles.now
    return StepTime(clock.products, clock.other, clock.uncovered, clock.kernels, in_cycles)


@dataclass
class _Clock:
    """Runs a module in its compiled order, and keeps the time.

    With `rate`, a kernel takes the cycles that its compiler estimates, at this many in a second.
    """

    module: Module
    chip: Chip
    efficiency: Efficiency
    wires: Mapping[str, int]
    steps: Mapping[str, set[str]]
    matmuls: Mapping[str, list[Matmul]]
    rate: float = 0.0
    products: float = 0.0
    other: float = 0.0
    uncovered: float = 0.0
    kernels: float = 0.0
    links_free: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.products + self.other + self.uncovered

    def run(self, computation: str, repeats: int) -> None:
        instructions = self.module.computations.get(computation, {}).values()
        last = {chain: step.name for step in instructions for chain in self.steps.get(step.name, ())}
        for instruction in instructions:
            if instruction.opcode == "while":
                for callee in instruction.callees:
                    self._loop(callee, repeats, instruction.trips)
            elif instruction.opcode == "conditional":
                self._branch(instruction, repeats)
            elif instruction.opcode == "call":
                for callee in instruction.callees:
                    self.run(callee, repeats)
            else:
                self._step(instruction, repeats, last)

    def _loop(self, callee: str, repeats: int, trips: int) -> None:
        before = self._tallies()
        self.run(callee, repeats * trips)
        once = self._tallies()
        for name, start in before.items():
            setattr(self, name, start + (once[name] - start) * trips)

    def _branch(self, instruction: Instruction, repeats: int) -> None:
        """Runs the branch that takes longest: of a step that is skipped or not, the one that updates."""
        before, longest = self._tallies(), None
        for callee in instruction.callees:
            for name, start in before.items():
                setattr(self, name, start)
            self.run(callee, repeats)
            if longest is None or sum(self._tallies().values()) > sum(longest.values()):
                longest = self._tallies()
        for name, value in (longest or before).items():
            setattr(self, name, value)

    def _tallies(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("products", "other", "uncovered", "kernels")}

    def _step(self, instruction: Instruction, repeats: int, last: Mapping[str, str]) -> None:
        if instruction.opcode.endswith("-done"):
            for name in instruction.operands:
                self._wait_for(name)
            return
        steps = self.steps.get(instruction.name, ())
        wire = self.wires.get(instruction.name, 0)
        if wire:
            of_links = LINKS.get(self.chip.vendor, Links())
            self.links_free = max(self.now, self.links_free) + link_seconds(wire, self.chip, of_links)
            # Of a collective in steps, the first has the bytes, and the last waits for them.
            self.ends |= dict.fromkeys(steps or [instruction.name], self.links_free)
        if is_work(instruction, self.module, self.matmuls):
            self._kernel(instruction, repeats)
        if wire and not steps and not instruction.opcode.endswith("-start"):
            self._wait_for(instruction.name)
        for chain in steps:
            if last[chain] == instruction.name:
                self._wait_for(chain)

    def _wait_for(self, name: str) -> None:
        self.uncovered += max(0.0, self.ends.pop(name, 0.0) - self.now)

    def _kernel(self, kernel: Instruction, repeats: int) -> None:
        self.kernels += 1
        moved: float = moved_bytes(kernel, self.module)
        matmuls = self.matmuls.get(kernel.name, [])
        traffic = sum(matmul.traffic for matmul in matmuls) / repeats
        if traffic:  # a kernel that reads arrays more than once; of those in a core's own memory as many again
            moved *= max(1.0, traffic / max(self.module.traffic(kernel), 1))
        least = max(
            sum(seconds(matmul, self.chip) for matmul in matmuls) / repeats,
            moved / (self.chip.bandwidth / self.chip.devices),
        )
        if self.rate and kernel.cycles:
            took = kernel.cycles / self.rate
        elif matmuls:
            computing = sum(self._computing(matmul, kernel) for matmul in matmuls) / repeats
            took = product_seconds(computing, moved, self.chip, self.efficiency)
        else:
            computing = arithmetic_seconds(kernel, self.module, self.chip)
            took = transfer_seconds(moved, self.chip, self.efficiency, computing)
        if matmuls:
            self.products += max(took, least)
        else:
            self.other += max(took, least)

    def _computing(self, matmul: Matmul, kernel: Instruction) -> float:
        dtypes = matmul.compiled or matmul.asked
        peak = peak_of(dtypes, self.chip)
        # The tables of convolutions on NVIDIA's GPUs have channels first, which tensor cores do not take as they are.
        kind = matmul.kind
        if kind == "convolution" and self.chip.vendor == "nvidia" and not _CHANNELS_FIRST.search(kernel.attributes):
            kind = "dot"
        flops = matmul.flops * padded(matmul, self.chip)
        return computing_seconds(flops, peak, _bits(dtypes), self.chip, self.efficiency, kind)


def _bits(dtypes: Sequence[str]) -> int:
    return max(next((bits for name, bits in _BITS.items() if dtype.startswith(name)), 32) for dtype in dtypes)


class Spread(NamedTuple):
    """Published runs that XLA compiled, on a chip or a generation: how many, and their time by the predicted one."""

    runs: int
    least: float
    most: float

    @property
    def words(self) -> str:
        """How long they took, as a share of the predicted time."""
        return f"{self.least:.2f} to {self.most:.2f}" if self.runs > 1 else f"{self.least:.2f}"


# By chip, and by generation for the chips without a run, of the runs that XLA compiled:
# `python benchmarks/planner/predictions.py` writes the file.
_TABLE = json.loads(Path(__file__).with_name("spreads.json").read_text())
SPREADS: Mapping[str, Spread] = MappingProxyType({name: Spread(*figures) for name, figures in _TABLE.items()})


def scored_as(chip: Chip) -> tuple[str, ...]:
    """The keys in `SPREADS`: the chip's own, and a GPU's generation; each TPU is a generation of its own."""
    return (chip.name,) if chip.vendor == "google" else (chip.name, generation_of(chip))


def spread_of(chip: Chip) -> Spread | None:
    """Published runs that XLA compiled on this chip, or else its generation; None where there is none."""
    return next((SPREADS[key] for key in scored_as(chip) if key in SPREADS), None)


def score(chip: Chip) -> str:
    """How far published runs that XLA compiled, on this chip or else its generation, were from their predicted time."""
    key = next((key for key in scored_as(chip) if key in SPREADS), None)
    if key is None:
        return "No published run that XLA compiled for a chip of this generation was compared with its prediction."
    spread = SPREADS[key]
    which = "this chip" if key == chip.name else "chips of this generation"
    if spread.runs == 1:
        return f"One published run that XLA compiled for {which}, it took {spread.words} of the predicted time."
    return f"{spread.runs} published runs that XLA compiled for {which} took {spread.words} of the predicted time."
