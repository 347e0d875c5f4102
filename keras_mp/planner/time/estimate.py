"""What a compiled step computes and moves, and how long that takes at the chip's rates: a bound, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_mp.planner.read.collectives import Collective
from keras_mp.planner.read.hlo import Module, is_work, moved_bytes
from keras_mp.planner.read.matmuls import Matmul, seconds
from keras_mp.precision.chips import Chip
from keras_mp.reporting.text import listed


@dataclass(frozen=True)
class Roofline:
    """Least seconds at the chip's rates, which no kernel reaches.

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
    """Seconds of collectives at the links' rate, which none reaches.

    How much of it passes while the chip computes is decided when the step runs.

    Args:
        seconds: `wire` at `rate`.
        wire: the bytes that a device sends in a step, on a ring.
        rate: bytes per second that a device sends, over all of its links together.
        link: the name of the links, such as "NVLink 4".
        covered: the part of `wire` that collectives send beside which products run in the compiled order of kernels.
    """

    seconds: float
    wire: int
    rate: float
    link: str
    covered: int = 0


def estimate(matmuls: Sequence[Matmul], module: Module, chip: Chip) -> Roofline:
    """Adds up what the chip's rates allow.

    Args:
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


def impossible(matmuls: Sequence[Matmul], roofline: Roofline, predicted: float, chip: Chip) -> str:
    """Says where a prediction is below the peak rate's time.

    Args:
        matmuls: the products, also those of which nothing was found in the compiled step.
        roofline: the bound of the others.
        predicted: the predicted seconds of a step.
        chip: the chip; a device has its share of the rates.

    Returns:
        A sentence; "" where the time is possible.
    """
    lost = [matmul for matmul in matmuls if not matmul.runs]
    least = roofline.compute + sum(seconds(matmul, chip) for matmul in lost)
    if predicted >= least:
        return ""
    return (
        f"{predicted * 1e3:.3g} ms is impossible: the products that the step asks for take {least * 1e3:.3g} ms "
        f"at the chip's peak rate, and {len(lost)} of {len(matmuls)} were not found in the compiled step, in "
        f"{listed([*dict.fromkeys(matmul.layer for matmul in lost)], 80, 'layers')}. This is a fault of keras_mp: "
        "please report it."
    )


def link_time(collectives: Sequence[Collective], chip: Chip) -> LinkTime | None:
    """Time of collectives at the links' rate, or None."""
    if chip.link is None or not collectives:
        return None
    wire, covered = (sum(getattr(collective, name) for collective in collectives) for name in ("wire", "covered"))
    bandwidth = chip.link.bandwidth / chip.devices
    return LinkTime(wire / bandwidth, wire, bandwidth, chip.link.name, covered)
