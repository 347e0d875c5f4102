"""How long a compiled step takes: its kernels one after another, and the collectives that they do not cover.

The constants of a chip's generation are fitted by `benchmarks/planner/fit_efficiency.py` to published measurements of
matrix products, of convolutions, of memory bandwidth and of collectives, which are listed with their sources in
`benchmarks/planner/efficiency_tables.json`. No training step is among them; how far published steps were from their
predicted time is in `intervals.json`.
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
    """What collectives reach, each as on a ring.

    Args:
        share: the share of the links' bandwidth.
        start: the seconds that the smallest takes.
    """

    share: float = 1.0
    start: float = 0.0


# By the vendor of the chip; other links run at their peak: there is no table of theirs.
LINKS: Mapping[str, Links] = MappingProxyType({"nvidia": Links(0.766, 3.72e-05)})

# The side of a TPU's matrix unit: `mxu_column_size` of jax/_src/pallas/mosaic/tpu_info.py, of v6e also Google's page of
# the chip; of others 128. To it all sizes of a product are padded: github.com/jax-ml/scaling-book, tpus.md.
SIDES: Mapping[str, int] = MappingProxyType({"v6e": 256, "v7x": 256})


# The rate of cuDNN's attention as a share of that of large products. On an H100, of 128 features and 4,096 to 16,384
# tokens, it reaches 518 to 609 TFLOP/s forward and 499 to 518 backward: figures 5 and 6 of FlashAttention-3
# (arXiv:2407.08608; read in a transcription), which is 0.52 of the peak where products reach 0.82.
ATTENTION = 0.64
# The operations of a TPU's vector units for a score in each product of attention: fitted to axlearn's times of Splash
# on a v5p. And their rate as a share of the peak: 1,024 lanes of 2 adders on v4, of 4 since, beside 4 matrix units of
# 128 or 256 squared (github.com/jax-ml/scaling-book, tpus.md, which ends at v6e).
OPERATIONS = 9.76
VECTOR: Mapping[str, float] = MappingProxyType({"v4": 1 / 64, "v5e": 1 / 32, "v5p": 1 / 32, "v6e": 1 / 128})


def generation_of(chip: Chip) -> str:
    """The key in `EFFICIENCIES`, or that of the nearest generation."""
    if chip.vendor == "google":
        return "v7x" if chip.name == "v7x" else "v6e"
    major, _, minor = chip.architecture.partition(".")
    if major == "7":
        return f"7.{minor}"
    return {"8": "8", "9": "9"}.get(major, "10")


def computing_seconds(flops: float, peak: float, bits: int, chip: Chip, of: Efficiency, kind: str = "dot") -> float:
    """What a large product takes if nothing else limits it.

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


def scoring_seconds(flops: float, features: int, chip: Chip) -> float:
    """What attention takes on a TPU's vector units, or 0."""
    rate = chip.peak["bfloat16"] / chip.devices * VECTOR.get(chip.name, math.inf)
    return OPERATIONS * flops / (2 * features * rate)


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
    """What a collective takes by bytes sent, or 0."""
    if not wire or chip.link is None:
        return 0.0
    return of.start + wire / (chip.link.bandwidth / chip.devices * of.share)


def padded(matmul: Matmul, chip: Chip) -> float:
    """How often a TPU makes the operations of a product.

    It fills all rows and columns of a matrix unit: a factor of 1 or more.
    A product with one row or one column is a sum of products to XLA, which vector units compute.
    """
    rows, _, columns = matmul.sizes
    if chip.vendor != "google" or matmul.kind == "convolution" or 1 in (rows, columns):
        return 1.0
    side = SIDES.get(chip.name, 128)
    return math.prod(math.ceil(size / side) * side / size for size in matmul.sizes if size)


def transfer_seconds(moved: float, chip: Chip, of: Efficiency, computing: float = 0.0) -> float:
    """What other kernels take, by bytes moved and arithmetic."""
    moving = moved / (chip.bandwidth / chip.devices * of.stream)
    return of.start + (computing**2 + moving**2) ** 0.5


_CHANNELS_FIRST = re.compile(r"dim_labels=bf\d")
_BITS = {"float8": 8, "int8": 8, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step; `docs/tables/predictions.md` tests such.

    Args:
        products: kernels that contain a dot or a convolution.
        other: all other kernels.
        uncovered: collectives, as far as no kernel runs beside them in the compiled order.
        kernels: the number of kernels that a step starts.
        unscored: the reason for which reports give no time; "" where they give one.
    """

    products: float
    other: float
    uncovered: float
    kernels: float
    unscored: str = ""

    @property
    def dominant(self) -> str:
        """What takes the most of it: "products", "other kernels" or "collectives"."""
        parts = {"products": self.products, "other kernels": self.other, "collectives": self.uncovered}
        return max(parts, key=parts.__getitem__)

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
    unscored = _unscored(matmuls, module, chip) or between_steps(chip, devices // chip.devices, clock.now)
    return StepTime(clock.products, clock.other, clock.uncovered, clock.kernels, unscored)


_GROUPED = re.compile(r"(feature|batch)_group_count=(?!1\b)\d")


def _unscored(matmuls: Sequence[Matmul], module: Module, chip: Chip) -> str:
    """Says which kernels of a step no published table has, so that its time is off by an unknown factor."""
    if chip.vendor == "nvidia" and any(set(matmul.compiled) == {"int8"} for matmul in matmuls):
        return "it has products of INT8, of which no run on a GPU was compared with its prediction (openxla/xla#40680)"
    convolving = {matmul.runs for matmul in matmuls if matmul.kind == "convolution"}
    kernels = list(module.kernels(one_branch=True))
    grouped = {
        kernel.name
        for kernel, _ in kernels
        if kernel.name in convolving and any(_GROUPED.search(inner.attributes) for inner in module.inside(kernel))
    }
    moved = {kernel.name: moved_bytes(kernel, module) * repeats for kernel, repeats in kernels}
    if sum(moved[name] for name in grouped) <= 0.05 * sum(moved.values()):
        return ""  # too few bytes for their time to count
    return f"it has {len(grouped)} kernels of grouped convolutions, whose published steps took 1.1 to 2.6 times as long"


def between_steps(chip: Chip, chips: int, seconds: float) -> str:
    """Says that a step is too small; "" of others."""
    if chip.vendor != "google" or chips <= (8 if chip.name in ("v5e", "v6e") else 4) or seconds >= 0.1:
        return ""  # as many chips as a host may have
    return "it takes less than 0.1 s on several hosts, whose own work between steps is not in it"


@dataclass
class _Clock:
    """Runs a module in its compiled order, and keeps the time."""

    module: Module
    chip: Chip
    efficiency: Efficiency
    wires: Mapping[str, int]
    steps: Mapping[str, set[str]]
    matmuls: Mapping[str, list[Matmul]]
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
            if instruction.opcode in ("while", "call"):
                for callee in instruction.callees:
                    trips, before = instruction.trips, self._tallies()
                    self.run(callee, repeats * trips)
                    once = self._tallies()
                    vars(self).update({name: start + (once[name] - start) * trips for name, start in before.items()})
            elif instruction.opcode == "conditional":
                self._branch(instruction, repeats)
            else:
                self._step(instruction, repeats, last)

    def _branch(self, instruction: Instruction, repeats: int) -> None:
        """Runs the branch that takes longest: of a step that is skipped or not, the one that updates."""
        longest = before = self._tallies()
        for callee in instruction.callees:
            vars(self).update(before)
            self.run(callee, repeats)
            longest = max(longest, self._tallies(), key=lambda tallies: sum(tallies.values()))
        vars(self).update(longest)

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
        if matmuls:
            computing = sum(self._computing(matmul, kernel) for matmul in matmuls) / repeats
            self.products += max(product_seconds(computing, moved, self.chip, self.efficiency), least)
        else:
            computing = arithmetic_seconds(kernel, self.module, self.chip)
            self.other += max(transfer_seconds(moved, self.chip, self.efficiency, computing), least)

    def _computing(self, matmul: Matmul, kernel: Instruction) -> float:
        dtypes = matmul.compiled or matmul.asked
        peak = peak_of(dtypes, self.chip)
        # The tables of convolutions on NVIDIA's GPUs have channels first, which tensor cores do not take as they are.
        kind = matmul.kind
        if kind == "convolution" and self.chip.vendor == "nvidia" and not _CHANNELS_FIRST.search(kernel.attributes):
            kind = "dot"
        flops = matmul.flops * padded(matmul, self.chip)
        computing = computing_seconds(flops, peak, _bits(dtypes), self.chip, self.efficiency, kind)
        return max(computing, scoring_seconds(matmul.flops, matmul.sizes[1], self.chip) if kind == "kernel" else 0.0)


def _bits(dtypes: Sequence[str]) -> int:
    return max(next((bits for name, bits in _BITS.items() if dtype.startswith(name)), 32) for dtype in dtypes)


class Interval(NamedTuple):
    """A range of times by the predicted one, as published.

    Nine of ten runs that are like them are in it: it is a conformal interval, around the median.

    Args:
        least, most: the ends of the interval.
        runs, sources: the number of runs, and that of the repositories that published them.
        held: the number of runs that are in the interval which the other sources give.
    """

    least: float
    most: float
    runs: int
    sources: int
    held: int


# `python benchmarks/planner/intervals.py` writes the file, from the published runs of benchmarks/planner.
_TABLE = json.loads(Path(__file__).with_name("intervals.json").read_text())
INTERVALS: Mapping[str, Interval] = MappingProxyType({name: Interval(*figures) for name, figures in _TABLE.items()})


def classes(chip: Chip, dominant: str) -> tuple[str, ...]:
    """Classes of a step by chip and bottleneck, narrowest first."""
    tpu = chip.vendor == "google"
    ours = chip.title if tpu else f"GPUs of compute capability {generation_of(chip)}"
    wider = "TPUs" if tpu else "NVIDIA's GPUs"
    return f"{ours}, mostly {dominant}", ours, f"{wider}, mostly {dominant}", wider


def interval_of(chip: Chip, time: StepTime) -> tuple[str, Interval]:
    """The narrowest class with an interval, and the interval."""
    return next((name, INTERVALS[name]) for name in classes(chip, time.dominant) if name in INTERVALS)


def score(chip: Chip, time: StepTime) -> str:
    """The error of published steps like this, or why none."""
    if time.unscored:
        return f"No time is given: {time.unscored}."
    name, of = interval_of(chip, time)
    return (
        f"Nine of ten steps like the {of.runs} published ones that XLA compiled ({name}) take {of.least:.2f} to "
        f"{of.most:.2f} times their prediction. Of the {of.runs}, from {of.sources} sources, {of.held} are in the "
        "range that the other sources give."
    )
