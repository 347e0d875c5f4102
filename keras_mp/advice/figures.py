"""What the compiler, or the shapes alone, say of a step under a set of measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_mp.precision.chips import Chip
from keras_mp.xla.compile_report import CompileReport
from keras_mp.xla.estimate import Roofline, peak_of
from keras_mp.xla.memory import Buffer

_LARGEST = 5


@dataclass(frozen=True)
class Figures:
    """A step under a set of measures, of one device, in bytes and operations.

    Args:
        weights: with those that do not train.
        optimizer: its slots, accumulated gradients among them.
        other: metrics and the batch.
        activations: of the temporary memory what the forward pass keeps for the backward pass, an estimate.
        temporary: all that is needed between the arguments and the results, by the compiler.
        peak: of the whole step.
        flops: of the products, by the dtypes of their operands as compiled, such as "bfloat16 x bfloat16"; None where
            nothing compiled.
        moved: bytes that kernels read and write.
        time: of the step, predicted, in seconds, on the chip that it was compiled for; None where nothing compiled, or
            where the compiler divides the products.
        largest: the largest arrays when memory is fullest, an estimate.
        seconds: that the compiler took, now or when the result that was kept was made.
        notes: how it was compiled, where not as usual.
        extrapolated: from how many of the model's blocks, such as "4 and 8 of 48 blocks"; "" where all were compiled.
    """

    weights: int
    optimizer: int
    other: int = 0
    activations: int = 0
    temporary: int = 0
    peak: int = 0
    flops: Mapping[str, float] | None = None
    moved: float = 0.0
    time: float | None = None
    largest: tuple[Buffer, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    extrapolated: str = ""

    @property
    def state(self) -> int:
        """What lasts from step to step, and the batch."""
        return self.weights + self.optimizer + self.other

    @property
    def rest(self) -> int:
        """What the peak holds beside the state and the activations: gradients and other temporary arrays."""
        return max(0, self.peak - self.state - self.activations)

    def pressure(self, capacity: int) -> float:
        """What is needed beside the state by the room for it; 1 or below where the step fits."""
        room = capacity - self.state
        return (self.peak - self.state) / room if room > 0 else float("inf")

    def roofline(self, chip: Chip) -> Roofline | None:
        """The least time of a step at a device's share of a chip's rates, an estimate; None where nothing compiled."""
        if self.flops is None:
            return None
        rates = {dtypes: peak_of(dtypes.split(" x "), chip) / chip.devices for dtypes in self.flops}
        compute = sum(flops / rates[dtypes] for dtypes, flops in self.flops.items())
        memory = self.moved / (chip.bandwidth / chip.devices)
        return Roofline(max(compute, memory), compute, memory, 0)


def figures_of(report: CompileReport, chip: Chip) -> Figures:
    """Takes the figures from a report of a step that was compiled for this chip."""
    flops: dict[str, float] = defaultdict(float)
    for matmul in (matmul for matmul in report.matmuls if matmul.runs):
        flops[" x ".join(matmul.compiled or matmul.asked)] += matmul.flops
    memory, roofline = report.memory, report.roofline
    peak = memory.peak
    notes: tuple[str, ...] = ()
    if report.refused:  # what the compiler leaves a program is less than the memory, of which the runtime has a part
        peak = max(peak, chip.device_bytes + 1 + memory.peak - memory.capacity)
        notes = (f"The compiler refuses the step: {report.refused}.",)
    return Figures(
        weights=memory.parameters,
        optimizer=memory.optimizer,
        other=memory.other,
        activations=memory.activations,
        temporary=memory.temporary,
        peak=peak,
        flops=None if report.refused else dict(flops),
        moved=roofline.memory * chip.bandwidth / chip.devices if roofline else 0.0,
        time=report.time.seconds if report.time else None,
        largest=memory.largest[:_LARGEST],
        seconds=report.seconds,
        notes=notes,
        extrapolated="; ".join(map(str, report.extrapolated)),
    )


def figures_from(values: Mapping[str, Any]) -> Figures:
    """Reads figures as `plain_values` writes them."""
    largest = tuple(Buffer(**buffer | {"shape": tuple(buffer["shape"])}) for buffer in values["largest"])
    return Figures(**{**values, "largest": largest, "notes": tuple(values["notes"])})


def with_numbers(figures: Figures, paths: Sequence[str]) -> Figures:
    """Figures with the numbers of layers in place of their paths: a model that is built again has other paths."""
    return _with_layers(figures, {path: str(number) for number, path in enumerate(paths)})


def with_names(figures: Figures, paths: Sequence[str]) -> Figures:
    """The reverse of `with_numbers`, for the layers of another model of the same structure."""
    return _with_layers(figures, {str(number): path for number, path in enumerate(paths)})


def _with_layers(figures: Figures, names: Mapping[str, str]) -> Figures:
    largest = tuple(replace(buffer, layer=names.get(buffer.layer, buffer.layer)) for buffer in figures.largest)
    return replace(figures, largest=largest)
