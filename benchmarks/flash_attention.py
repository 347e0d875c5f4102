"""The time of a compiled step if its attention were flash attention, whose scores never leave the cores.

XLA writes the scores of attention to memory, unless a kernel that was written by hand stands for it. Of a step whose
source runs such a kernel, the compiled kernels are timed as if the arrays of scores were in the own memory of a core,
where they move no bytes. What they compute is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.lowered import Lowered
from keras_mp.lean import attention
from keras_mp.parallel.plan import plan_of
from keras_mp.xla.compile import compile_step
from keras_mp.xla.compile_report import CompileReport
from keras_mp.xla.hlo import Instruction, Module, Shape
from keras_mp.xla.inspect import report_on
from keras_mp.xla.lower import build_without_values, lower_step
from keras_mp.xla.step_time import step_time
from keras_mp.xla.targets import find_target


@contextmanager
def attention_in(blocks: int) -> Iterator[None]:
    """Within it, the kit's attention takes its queries in so many blocks of rows, where they are long enough."""
    before = attention.BLOCKS
    attention.BLOCKS = blocks
    try:
        yield
    finally:
        attention.BLOCKS = before


class Scores(NamedTuple):
    """The scores of a device's batch.

    Args:
        heads: the heads of all sequences of a device's batch.
        length: the tokens of a sequence.
        features: the features of a head.
    """

    heads: int
    length: int
    features: int

    def holds(self, shape: Shape) -> bool:
        """Whether an array has the scores of a block of rows, for the columns that the block sees."""
        rows = max(attention.BLOCK, -(-self.length // attention.BLOCKS))
        for columns in range(rows, self.length + 1, rows):
            # Of as many elements and sizes is an array of activations, where a head has as many features as a block
            # has rows.
            alike = rows == self.features and columns == self.length
            if shape.size and columns in shape.dimensions and not alike:
                if _elements(shape) == self.heads * rows * columns:
                    return True
        return False


class FlashLook:
    """Inspects steps, and keeps of each the time with flash attention.

    Args:
        scores: the scores of the steps; None where there is nothing to keep.
        precision: the precision of the models, for the reports.
        until: the stage that the compiler goes to, as of `keras_mp.xla.compile.compile_step`.
    """

    def __init__(self, scores: Scores | None, precision: str, until: str = "code") -> None:
        self.scores, self.precision, self.until = scores, precision, until
        self.seconds: list[float] = []

    def __call__(
        self, build: Callable[[], keras.Model], batch: Any, target: str, *, strategy: str | None = None
    ) -> CompileReport:
        """`keras_mp.inspect` of a training step of a model that a function builds."""
        chip = find_target(target)
        plan = plan_of(strategy, chip.devices, chip.topology) if strategy else None
        lowered: Lowered = lower_step(build_without_values(build), batch, training=True, chip=chip.traced, plan=plan)
        step = compile_step(lowered, chip, until=self.until)
        report = report_on(step, self.precision, plan=plan)
        if self.scores and report.time and chip.chip:
            devices = plan.size if plan else 1
            inside = kept_in_cores(step.module, self.scores)
            self.seconds.append(step_time(report.matmuls, inside, chip.chip, devices).seconds)
        return report


def kept_in_cores(module: Module, scores: Scores) -> Module:
    """The module with its arrays of scores in the own memory of a core."""

    def kept(instruction: Instruction) -> Instruction:
        if not any(map(scores.holds, instruction.shapes)):
            return instruction
        shapes = (shape._replace(fast=True) if scores.holds(shape) else shape for shape in instruction.shapes)
        return replace(instruction, shapes=tuple(shapes))

    computations = {
        name: {of: kept(instruction) for of, instruction in inside.items()}
        for name, inside in module.computations.items()
    }
    return Module(module.entry, computations)


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape.dimensions:
        count *= size
    return count
