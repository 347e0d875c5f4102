"""The figures of a step: what shapes alone say of its memory, and the line through steps with few of its blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

from keras_mp.lowering import Argument, Plan
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.read.memory import Memory, sizes_by_kind
from keras_mp.planner.report.compile_report import CompileReport

# A model with more equal blocks than DEEP is asked about by models with so many. They take a compiler for GPUs as long
# as one with twice their sum, because it compiles equal kernels once. With 2 a TPU's fetches weights further ahead, and
# needs more memory than with 4.
BLOCKS = (4, 8)
DEEP = 2 * sum(BLOCKS)


def state_of(memory: Memory) -> int:
    """What lasts from step to step, and the batch."""
    return memory.parameters + memory.optimizer + memory.other


def pressure(memory: Memory, capacity: int) -> float:
    """A step's need beside its state, by room; 1 fits."""
    room = capacity - state_of(memory)
    return (memory.peak - state_of(memory)) / room if room > 0 else float("inf")


def extrapolated(few: CompileReport, many: CompileReport, blocks: tuple[int, int], depth: int) -> CompileReport:
    """Extrapolates a report to all blocks, from steps with few.

    Memory and times are on the line through both; products and all else that is listed are those of the step with more.

    Args:
        few, many: the figures of steps with `blocks` of them.
        blocks: two rising numbers.
        depth: the number of blocks that the model has.
    """
    times = Fraction(depth - blocks[0], blocks[1] - blocks[0])
    memory = on_line(few.memory, many.memory, times)
    roofline = on_line(few.roofline, many.roofline, times)
    least = memory.arguments + memory.outputs - memory.aliased + memory.temporary
    return replace(
        many,
        memory=replace(
            memory,
            peak=max(memory.peak, least),
            capacity=min(few.memory.capacity, many.memory.capacity),  # less where the compiler refuses the step
        ),
        roofline=roofline and replace(roofline, seconds=max(roofline.compute, roofline.memory)),
        time=on_line(few.time, many.time, times),
        link_time=on_line(few.link_time, many.link_time, times),
        refused=few.refused or many.refused,
        seconds=few.seconds + many.seconds,
        extrapolated=f"{blocks[0]} and {blocks[1]} of {depth} blocks",
    )


def on_line(few: Any, many: Any, times: Fraction) -> Any:
    """Extrapolates a figure to all blocks, along a line.

    What falls from few blocks to more is taken as it is: more of them do not make it smaller.

    Args:
        few, many: numbers; or dataclasses or mappings, of which each number is on its line and all else is that of
            `many`; None stays None.
        times: the number of times that the growth from few to many is added.
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


def memory_by_shapes(arguments: Sequence[Argument], measures: Measures, plan: Plan | None, capacity: int) -> Memory:
    """The least that a step takes, whatever the compiler does.

    Gradients are not counted: a compiler may use each as soon as it is there.

    Args:
        arguments: the arguments of the step on one device, with the weights and slots that it has under the measures.
        measures: the measures, of which micro-batches change the state.
        plan: the plan of the strategy.
        capacity: the memory of the device.

    Returns:
        The memory, without temporary arrays.
    """
    kinds = sizes_by_kind(_on_one_device(argument, plan) for argument in arguments)
    accumulated = kinds["parameters"] if measures.micro_batches > 1 else 0
    weights, optimizer = kinds["parameters"] + kinds["state"], kinds["optimizer"] + accumulated
    other = kinds["metrics"] + kinds["batch"] // (measures.micro_batches * (plan.replicas if plan else 1))
    state = weights + optimizer + other
    return Memory(
        parameters=weights,
        optimizer=optimizer,
        other=other,
        arguments=state,
        peak=state,
        capacity=capacity,
        host=kinds["host"],
    )


def _on_one_device(argument: Argument, plan: Plan | None) -> Argument:
    if plan is None or argument.kind in ("batch", "metrics"):
        return argument
    axes = plan.axes_of(argument.path, argument.shape, argument.dtype)
    return replace(argument, parts=math.prod(plan.shape[plan.axes.index(axis)] for axis in axes if axis))


def is_on_line(few: Counter[Any], many: Counter[Any], whole: Counter[Any], times: Fraction) -> bool:
    """Whether a model's layers grow with its blocks on lines.

    So a model whose config does not say all of it, as one with LoRA or frozen weights, is not on the line, nor is one
    whose blocks alternate otherwise.

    Args:
        few, many, whole: `Outline.kinds` with few blocks, with more, and with all.
        times: the number of times that the growth from few to many is added to reach all.
    """
    kinds = few | many | whole
    return few != many and all(few[kind] + times * (many[kind] - few[kind]) == whole[kind] for kind in kinds)
