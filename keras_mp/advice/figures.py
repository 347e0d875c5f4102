"""What the compiler, or the shapes alone, say of a step under a set of measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

from keras_mp.advice.measures import Measures
from keras_mp.backend.common.lowered import Argument
from keras_mp.parallel.plan import Plan
from keras_mp.precision.chips import Chip
from keras_mp.xla.estimate import Roofline
from keras_mp.xla.matmuls import peak_of
from keras_mp.xla.memory import Buffer, size_of


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
        kept: whether an earlier call had compiled the step.
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
    kept: bool = False

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


def extrapolated(few: Figures, many: Figures, blocks: tuple[int, int], depth: int) -> Figures:
    """The figures of a step with all blocks of a model, from those of steps with few of its blocks.

    Args:
        few, many: of steps with `blocks` of them.
        blocks: two rising numbers.
        depth: how many the model has.
    """
    whole = on_line(few, many, Fraction(depth - blocks[0], blocks[1] - blocks[0]))
    return replace(
        whole,
        peak=max(whole.peak, whole.state + whole.temporary),
        seconds=few.seconds + many.seconds,
        extrapolated=f"{blocks[0]} and {blocks[1]} of {depth} blocks",
    )


def on_line(few: Any, many: Any, times: Fraction) -> Any:
    """A figure of a model with all blocks, on the line through those with few of them and with more.

    What falls from few blocks to more is taken as it is: more of them do not make it smaller.

    Args:
        few, many: numbers; or dataclasses or mappings, of which each number is on its line and all else is that of
            `many`; None stays None.
        times: how often the growth from few to many is added.
    """
    if is_dataclass(many) and few is not None:
        parts = {part.name: (getattr(few, part.name), getattr(many, part.name)) for part in fields(many)}
        return replace(many, **{name: on_line(*pair, times) for name, pair in parts.items()})  # type: ignore[type-var]
    if isinstance(many, Mapping) and few is not None:
        return {name: on_line(few.get(name, 0), many.get(name, 0), times) for name in {**few, **many}}
    if not isinstance(many, int | float) or few is None:
        return many if few is not None else None
    value = max(few, many, few + times * (Fraction(many) - Fraction(few)))
    return round(value) if isinstance(many, int) else float(value)


def with_names(figures: Figures, names: Mapping[str, str]) -> Figures:
    """Figures with other names of layers: a model that is built again has other paths."""
    largest = tuple(replace(buffer, layer=names.get(buffer.layer, buffer.layer)) for buffer in figures.largest)
    return replace(figures, largest=largest)


def state_figures(arguments: Sequence[Argument], measures: Measures, plan: Plan | None) -> Figures:
    """The least that a step takes on one device, whatever the compiler does.

    Gradients are not counted: a compiler may use each as soon as it is there.

    Args:
        arguments: of the step on one device; of all measures, only the dtype of the states is in them.
        measures: of these, accumulation and the strategy change the state.
        plan: the strategy's.

    Returns:
        The figures, without temporary memory.
    """
    kinds: dict[str, int] = defaultdict(int)
    for argument in arguments:
        kinds[argument.kind] += size_of(_on_one_device(argument, plan))
    accumulated = kinds["parameters"] if measures.micro_batches > 1 else 0
    weights, optimizer = kinds["parameters"] + kinds["state"], kinds["optimizer"] + accumulated
    other = kinds["metrics"] + kinds["batch"] // (measures.micro_batches * (plan.replicas if plan else 1))
    return Figures(weights, optimizer, other, peak=weights + optimizer + other)


def _on_one_device(argument: Argument, plan: Plan | None) -> Argument:
    if plan is None or argument.kind in ("batch", "metrics"):
        return argument
    split = any(plan.axes_of(argument.path, argument.shape, argument.dtype))
    return replace(argument, parts=plan.replicas if split else 1)
