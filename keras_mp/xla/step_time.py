"""How long a compiled step takes: its kernels one after another, and the collectives that they do not cover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_mp.precision.chips import Chip
from keras_mp.xla.collectives import wire_of_kernels
from keras_mp.xla.efficiency import EFFICIENCIES, Efficiency, generation_of, product_seconds, transfer_seconds
from keras_mp.xla.estimate import peak_of
from keras_mp.xla.hlo import FREE, Instruction, Module
from keras_mp.xla.matmuls import Matmul

_BITS = {"float8": 8, "int8": 8, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class StepTime:
    """A prediction of what a step takes, in seconds; `docs/predictions.md` compares such with published runs.

    Args:
        products: kernels that contain a dot or a convolution.
        other: all other kernels.
        uncovered: collectives, as far as no kernel runs beside them in the compiled order.
        kernels: how many kernels a step starts.
    """

    products: float
    other: float
    uncovered: float
    kernels: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.products + self.other + self.uncovered


def step_time(matmuls: Sequence[Matmul], module: Module, chip: Chip, devices: int = 1) -> StepTime:
    """Predicts what a step takes.

    A product takes what its size, its operands' dtype and the chip's generation allow; another kernel, what the bytes
    allow that it moves. A collective that starts and ends apart runs beside the kernels between.

    Args:
        matmuls: the step's dots and convolutions, joined with what was compiled.
        module: the compiled step.
        chip: the chip; a device has its share of the rates.
        devices: how many devices share the step.
    """
    wires = wire_of_kernels(module, devices) if devices > 1 else {}
    clock = _Clock(module, chip, EFFICIENCIES[generation_of(chip)], wires, _by_kernel(matmuls))
    clock.run(module.entry, 1)
    return StepTime(clock.products, clock.other, clock.uncovered, clock.kernels)


def _by_kernel(matmuls: Sequence[Matmul]) -> Mapping[str, list[Matmul]]:
    kernels: dict[str, list[Matmul]] = defaultdict(list)
    for matmul in matmuls:
        if matmul.runs:
            kernels[matmul.runs].append(matmul)
    return kernels


@dataclass
class _Clock:
    """Runs a module in its compiled order, and keeps the time."""

    module: Module
    chip: Chip
    efficiency: Efficiency
    wires: Mapping[str, int]
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
        for instruction in self.module.computations.get(computation, {}).values():
            if instruction.opcode == "while":
                for callee in instruction.callees:
                    self._loop(callee, repeats, instruction.trips)
            elif instruction.opcode == "conditional":
                self._branch(instruction, repeats)
            elif instruction.opcode == "call":
                for callee in instruction.callees:
                    self.run(callee, repeats)
            else:
                self._step(instruction, repeats)

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

    def _step(self, instruction: Instruction, repeats: int) -> None:
        if instruction.opcode.endswith("-done"):
            self._wait(instruction)
            return
        starts = instruction.opcode.endswith("-start")
        wire = self.wires.get(instruction.name, 0)
        if wire:
            self.links_free = max(self.now, self.links_free) + self._link_seconds(wire)
            self.ends[instruction.name] = self.links_free
        if instruction.opcode not in FREE and not starts and (not wire or instruction.opcode == "fusion"):
            self._kernel(instruction, repeats)
        if wire and not starts:
            self._wait_for(instruction.name)

    def _wait(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            self._wait_for(name)

    def _wait_for(self, name: str) -> None:
        self.uncovered += max(0.0, self.ends.pop(name, 0.0) - self.now)

    def _link_seconds(self, wire: int) -> float:
        return wire / (self.chip.link.bandwidth / self.chip.devices) if self.chip.link else 0.0

    def _kernel(self, kernel: Instruction, repeats: int) -> None:
        self.kernels += 1
        moved = self.module.traffic(kernel)
        matmuls = self.matmuls.get(kernel.name)
        if not matmuls:
            self.other += transfer_seconds(moved, self.chip, self.efficiency)
            return
        dtypes = matmuls[0].compiled or matmuls[0].asked
        flops = sum(matmul.flops for matmul in matmuls) / repeats
        peak, bits = peak_of(dtypes, self.chip), _bits(dtypes)
        self.products += product_seconds(flops, moved, peak, bits, self.chip, self.efficiency)


def _bits(dtypes: Sequence[str]) -> int:
    return max(next((bits for name, bits in _BITS.items() if dtype.startswith(name)), 32) for dtype in dtypes)
