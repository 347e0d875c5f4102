"""How long a compiled step takes: its kernels one after another, and the collectives that they do not cover."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_mp.precision.chips import Chip
from keras_mp.xla.beside import chains
from keras_mp.xla.collectives import wire_of_kernels
from keras_mp.xla.efficiency import (
    CYCLES_A_SECOND,
    EFFICIENCIES,
    Efficiency,
    computing_seconds,
    generation_of,
    product_seconds,
    transfer_seconds,
)
from keras_mp.xla.estimate import peak_of, seconds
from keras_mp.xla.hlo import Instruction, Module
from keras_mp.xla.matmuls import Matmul
from keras_mp.xla.work import is_work, moved_bytes

_CHANNELS_FIRST = re.compile(r"dim_labels=bf\d")
_BITS = {"float8": 8, "int8": 8, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class StepTime:
    """A prediction of what a step takes, in seconds; `docs/predictions.md` compares such with published runs.

    Args:
        products: kernels that contain a dot or a convolution.
        other: all other kernels.
        uncovered: collectives, as far as no kernel runs beside them in the compiled order.
        kernels: how many kernels a step starts.
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
    allow that it moves. A collective that starts and ends apart, or runs in steps, runs beside the kernels between.
    The time is never below the bound of `keras_mp.xla.estimate.estimate`: both count the same kernels.

    Args:
        matmuls: the step's dots and convolutions, joined with what was compiled.
        module: the compiled step.
        chip: the chip; a device has its share of the rates.
        devices: how many devices share the step.
        efficiency: what kernels reach of the chip's rates; by default the constants of its generation.
    """
    wires = wire_of_kernels(module, devices) if devices > 1 else {}
    kernels = _by_kernel(matmuls)
    steps = _steps(module) if wires else {}
    clock = _Clock(module, chip, efficiency or EFFICIENCIES[generation_of(chip)], wires, steps, kernels)
    clock.run(module.entry, 1)
    in_cycles = 0.0
    if chip.name in CYCLES_A_SECOND and any(kernel.cycles for kernel, _ in module.kernels()):
        by_cycles = _Clock(module, chip, clock.efficiency, wires, steps, kernels, CYCLES_A_SECOND[chip.name])
        by_cycles.run(module.entry, 1)
        in_cycles = by_cycles.now
    return StepTime(clock.products, clock.other, clock.uncovered, clock.kernels, in_cycles)


def _by_kernel(matmuls: Sequence[Matmul]) -> Mapping[str, list[Matmul]]:
    kernels: dict[str, list[Matmul]] = defaultdict(list)
    for matmul in matmuls:
        if matmul.runs:
            kernels[matmul.runs].append(matmul)
    return kernels


def _steps(module: Module) -> Mapping[str, set[str]]:
    """By the names of kernels, the collectives of which they run a step."""
    kernels = {kernel.name: chains(module, kernel) for kernel, _ in module.kernels()}
    return {name: numbers for name, numbers in kernels.items() if numbers}


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
            self._wait(instruction)
            return
        steps = self.steps.get(instruction.name, ())
        wire = self.wires.get(instruction.name, 0)
        if wire:
            self.links_free = max(self.now, self.links_free) + self._link_seconds(wire)
            # Of a collective in steps, the first has the bytes, and the last waits for them.
            self.ends |= dict.fromkeys(steps or [instruction.name], self.links_free)
        if is_work(instruction, self.module, self.matmuls):
            self._kernel(instruction, repeats)
        if wire and not steps and not instruction.opcode.endswith("-start"):
            self._wait_for(instruction.name)
        for chain in steps:
            if last[chain] == instruction.name:
                self._wait_for(chain)

    def _wait(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            self._wait_for(name)

    def _wait_for(self, name: str) -> None:
        self.uncovered += max(0.0, self.ends.pop(name, 0.0) - self.now)

    def _link_seconds(self, wire: int) -> float:
        return wire / (self.chip.link.bandwidth / self.chip.devices) if self.chip.link else 0.0

    def _kernel(self, kernel: Instruction, repeats: int) -> None:
        self.kernels += 1
        moved = moved_bytes(kernel, self.module)
        matmuls = self.matmuls.get(kernel.name, [])
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
            took = transfer_seconds(moved, self.chip, self.efficiency)
        if matmuls:
            self.products += max(took, least)
        else:
            self.other += max(took, least)

    def _computing(self, matmul: Matmul, kernel: Instruction) -> float:
        dtypes = matmul.compiled or matmul.asked
        peak = peak_of(dtypes, self.chip)
        # The tables of convolutions on NVIDIA's GPUs have channels first, which tensor cores do not take as they are.
        kind = "dot" if self.chip.vendor == "nvidia" and not _CHANNELS_FIRST.search(kernel.attributes) else matmul.kind
        return computing_seconds(matmul.flops, peak, _bits(dtypes), self.chip, self.efficiency, kind)


def _bits(dtypes: Sequence[str]) -> int:
    return max(next((bits for name, bits in _BITS.items() if dtype.startswith(name)), 32) for dtype in dtypes)
