"""The training step of one model and batch under any measures, for any chip: lowered here, compiled elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import keras

from keras_mp.lowering import Lowered, Outline, Source, TracedChip
from keras_mp.planner.chips.place import Place
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.fit.figures import BLOCKS, DEEP, extrapolated, is_on_line, memory_by_shapes
from keras_mp.planner.fit.measures import Measure, Measures, Stage, ladders
from keras_mp.planner.inspect import report_on
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.suggestions import suggest
from keras_mp.reporting.text import shorten_middle
from keras_mp.system.packages import installed

# With more of a TPU's memory the code decides whether the step fits: 44 to 562 MiB of 16 GiB, in 20 deep models' steps.
ROOM_FOR_CODE = 0.85
WITHOUT_CODE = (
    "The TPU's compiler was ended when it had assigned memory, before it generated code: the program itself, a few "
    "hundred MiB, is not counted."
)


@dataclass(frozen=True)
class Question:
    """What a step takes on a chip, under some measures.

    Args:
        place: the chip.
        measures: the set of measures.
        whole: whether to compile with all blocks; otherwise with few of a deep model.
        precision: the precision to compare with that is asked about; "" in the search for the cheapest set.
        is_known: whether the step was compiled before.
        origin: another chip that it was compiled for, whose kernels are those of this one; None for this one.
    """

    place: Place
    measures: Measures
    whole: bool = False
    precision: str = ""
    is_known: bool = False
    origin: Place | None = None

    @property
    def compiled_for(self) -> Place:
        """The chip whose compiler answers."""
        return self.origin or self.place

    @property
    def words(self) -> str:
        """The measures as a reader calls them."""
        return self.measures.words + ", all blocks" * self.whole


class Compiled(NamedTuple):
    """A compiled step, or a deep model's with few blocks.

    Attributes:
        report: the report on the step.
        kept: whether an earlier call had compiled it.
        peak: the most memory that a step takes that was compiled for it, in bytes.
    """

    report: CompileReport
    kept: bool
    peak: int


class Step:
    """One model and batch.

    Args:
        source: the model, or the function that builds it.
        batch: the shapes of the batch of one update, on all devices.
        chip: the chip that the step is lowered for where it is only looked at.
        flags: further options of the compiler.
        strategy: the way in which several devices share it, where that was asked for.
        all_blocks: whether a deep model is compiled with all blocks.
        code: whether a step that nearly fills a TPU is compiled to the end, and its program counted.

    Attributes:
        plain: the step without any measure.
        outline: the figures of its model that need no program.
        depth: the number of its blocks, where the figures are taken from models with fewer; 0 where not.
        rows: the rows of the batch.

    Raises:
        ValueError: If the model is not built or not compiled, or the batch does not fit it.
    """

    def __init__(
        self,
        source: Source,
        batch: Any,
        chip: TracedChip,
        flags: Mapping[str, Any] | None = None,
        strategy: str = "",
        all_blocks: bool = False,
        code: bool = True,
    ) -> None:
        self.source, self._batch, self._flags, self._code = source, batch, flags, code
        self.rows = _rows(batch)
        self._lowered: dict[tuple[Any, ...], list[Lowered]] = {}
        self._helping: dict[tuple[Measures, str], bool] = {}
        self.plain = source.lower(batch, chip, policy=source.precision)
        self.outline = source.outline(source.precision, strategy=strategy)
        self._outlines = {Measures(source.precision): self.outline}
        self.depth = 0 if all_blocks else self._depth()

    def _depth(self) -> int:
        depth = self.outline.depth
        if depth <= DEEP:
            return 0
        try:
            few, many = (self.source.outline(self.source.precision, blocks=blocks).kinds for blocks in BLOCKS)
        except (TypeError, ValueError):
            return 0
        times = Fraction(depth - BLOCKS[0], BLOCKS[1] - BLOCKS[0])
        return depth if is_on_line(few, many, self.outline.kinds, times) else 0

    def ladders(self, place: Place) -> Iterator[list[Stage]]:
        """Yields what can be asked about for a chip, in order of what it changes."""
        rows = {name: self.rows // (plan.replicas if (plan := place.plan(name)) else 1) for name in place.strategies}
        libtpu = tuple(int(number) for number in re.findall(r"\d+", installed(["libtpu"]).get("libtpu", "")))

        def helps(taken: Measures, measure: Measure) -> bool:
            refused = place.platform == "tpu" and libtpu < measure.libtpu
            return not refused and self.helps(taken, measure)

        return ladders(place.policy, place.strategies, rows.__getitem__, helps)

    def helps(self, measures: Measures, measure: Measure) -> bool:
        """Whether a measure makes anything of the step smaller beside others, and can be taken with them."""
        key = measures.state, measure.name
        if key not in self._helping:
            self._helping[key] = self._is_smaller(measures, measure)
        return self._helping[key]

    def _is_smaller(self, measures: Measures, measure: Measure) -> bool:
        if measure.policy and measures.policy.removeprefix("mixed_") != measure.policy:
            return False
        if measure.helps:
            return measure.helps in self._outline(measures).helped
        if measure.policy and not self.source.is_function:
            return False
        # Nothing is frozen, the model was trained; or code of the user's own is not made for another policy.
        refused = Exception if measure.policy else (TypeError, ValueError)
        try:
            return self._weight(measures.plus(measure)) < self._weight(measures)
        except refused:
            return False

    def in_precision(self, measures: Measures, precision: str) -> Measures:
        """The measures in another precision, less those that do nothing there."""
        plain = replace(measures.with_names(()), precision=precision)
        for measure in measures.taken:
            if not measure.divides and not measure.policy and self.helps(plain, measure):
                plain = plain.plus(measure)
        return plain

    def state(self, place: Place, measures: Measures) -> Memory:
        """What shapes alone say."""
        plan = place.plan(measures.strategy)
        others = (argument for argument in self.plain.arguments if argument.kind in ("metrics", "batch"))
        plan = plan and replace(plan, rules=self.outline.rules)
        return memory_by_shapes([*self._outline(measures).arguments, *others], measures, plan, place.capacity)

    def lower(self, question: Question) -> list[Lowered]:
        """Lowers the step of a question, or of a deep model two; layers are called as in the plain model.

        Raises:
            CompileError: If the backend cannot trace the step.
        """
        measures, chip = question.measures, question.compiled_for.traced
        plan = question.place.plan(measures.strategy)
        key = (measures, chip, plan, question.whole)
        if key not in self._lowered:
            batch = _part(self._batch, self.rows, measures.micro_batches)
            steps = [
                self.source.lower(
                    batch, chip, policy=measures.policy, changes=measures.changes, blocks=blocks, plan=plan
                )
                for blocks in (BLOCKS if self.depth and not question.whole else (None,))
            ]
            paths = steps[0].layers
            names = dict(zip(paths, self.plain.layers, strict=True)) if len(paths) == len(self.plain.layers) else {}
            self._lowered[key] = [_named(step, self.plain.model, names) for step in steps]
        return self._lowered[key]

    def compile(self, question: Question, lowered: Sequence[Lowered]) -> Compiled:
        """Compiles a lowered step; it needs no model, and can run in any thread.

        Raises:
            CompileError: If the compiler fails, but for a step that is larger than the chip's memory.
        """
        result = self._compiled(question, lowered, "memory")
        report, place = result.report, question.place
        if place.platform != "tpu" or report.refused:
            return result
        if self._code and report.memory.peak > ROOM_FOR_CODE * place.capacity and report.memory.fits:
            return self._compiled(question, lowered, "code")
        without = () if report.memory.code else (WITHOUT_CODE,)
        return result._replace(report=replace(report, notes=(*report.notes, *without)))

    def _compiled(self, question: Question, lowered: Sequence[Lowered], until: str) -> Compiled:
        place, measures, origin = question.place, question.measures, question.origin
        target, plan = place.target, place.plan(measures.strategy)
        steps = [compile_step(step, question.compiled_for.target, self._flags, until) for step in lowered]
        reports = [report_on(replace(step, target=target), measures.policy, plan=plan) for step in steps]
        report = reports[0]
        if len(reports) > 1:
            report = extrapolated(reports[0], reports[1], BLOCKS, self.depth)
            seconds = report.time.seconds if report.time else 0.0
            advice = suggest(report.matmuls, report.sensitive, report.memory, target, report.precision, seconds)
            report = replace(report, advice=tuple(advice))
        if origin is not None:
            note = f"Compiled for {origin.title}, of the same architecture; times are at the rates of {place.title}."
            report = replace(report, notes=(*report.notes, note))
        return Compiled(report, all(step.kept for step in steps), max(one.memory.peak for one in reports))

    def _outline(self, measures: Measures) -> Outline:
        """The model under those of the measures that decide its weights and slots, built once."""
        key = measures.state
        if key not in self._outlines:
            self._outlines[key] = self.source.outline(key.policy, key.changes)
        return self._outlines[key]

    def _weight(self, measures: Measures) -> int:
        return memory_by_shapes(self._outline(measures).arguments, Measures(measures.precision), None, 0).peak


def _named(step: Lowered, model: str, names: Mapping[str, str]) -> Lowered:
    """A step with other names of the model and its layers: a model that is built again has others."""
    calls = tuple(replace(call, path=names.get(call.path, call.path)) for call in step.calls)
    return replace(step, model=model, calls=calls)


def _rows(batch: Any) -> int:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", None)]
    if not leaves or not isinstance(leaves[0].shape[0], int):
        raise ValueError(
            "batch must be (x, y), arrays or keras.KerasTensor whose first axis are the rows; got "
            f"{shorten_middle(repr(batch), 200)}"
        )
    return leaves[0].shape[0]


def _part(batch: Any, rows: int, micro_batches: int) -> Any:
    """The shapes of one micro-batch."""

    def one(leaf: Any) -> Any:
        shape = tuple(getattr(leaf, "shape", ()))
        if not shape or shape[0] != rows:
            return leaf
        return keras.KerasTensor((rows // micro_batches, *shape[1:]), keras.backend.standardize_dtype(leaf.dtype))

    return batch if micro_batches == 1 else keras.tree.map_structure(one, batch)
