"""The training step of one model and batch under any measures, for any chip: lowered here, compiled elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.lowered import Argument, Lowered
from keras_mp.parallel.plan import plan_of
from keras_mp.parallel.split_rules import with_rules_of
from keras_mp.planner.chips.place import Place
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.compile.lower import lower_step
from keras_mp.planner.fit.fewer_blocks import BLOCKS, DEEP, is_on_line
from keras_mp.planner.fit.figures import extrapolated, memory_by_shapes
from keras_mp.planner.fit.measures import MEASURES, Measure, Measures
from keras_mp.planner.fit.source import Source
from keras_mp.planner.inspect import report_on
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.suggestions import suggest
from keras_mp.precision.policy import COMPUTES_IN
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class
from keras_mp.reporting.text import shorten_middle

# With more of a TPU's memory the code decides whether the step fits: 44 to 562 MiB of 16 GiB, in 20 deep models' steps.
ROOM_FOR_CODE = 0.85
WITHOUT_CODE = (
    "The TPU's compiler was ended when it had assigned memory, before it generated code: the program itself, a few "
    "hundred MiB, is not counted."
)


class Compiled(NamedTuple):
    """A step that was compiled, or of a deep model steps with few blocks.

    Attributes:
        report: the report on the step.
        kept: whether an earlier call had compiled it.
        peak: the most memory that a step takes that was compiled for it, in bytes.
    """

    report: CompileReport
    kept: bool
    peak: int


@dataclass(frozen=True)
class _Form:
    """The model under measures that decide its weights and slots.

    Args:
        arguments: the arguments of its step: weights and slots.
        helping: the names of the measures that make something in it smaller, of those that look at the model.
    """

    arguments: tuple[Argument, ...]
    helping: frozenset[str]


class Step:
    """One model and batch.

    Args:
        source: the model, and where it comes from.
        batch: the shapes of the batch of one update, on all devices.
        chip: the chip that the step is lowered for where it is only looked at.
        flags: further options of the compiler.
        strategy: the way in which several devices share it, where that was asked for.
        all_blocks: whether a deep model is compiled with all blocks.
        code: whether a step that nearly fills a TPU is compiled to the end, and its program counted.

    Attributes:
        model: the name of the model.
        parameters: the elements of its weights that train.
        depth: the number of its blocks, where the figures are taken from models with fewer; 0 where not.
        rows: the rows of the batch.
        sees_batch: names of its layers that compute statistics of a batch.

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
        self._source, self._batch, self._flags, self._code = source, batch, flags, code
        self.rows = _rows(batch)
        self._lowered: dict[tuple[Any, ...], list[Lowered]] = {}
        plain = Measures(source.precision)
        model = source.under(plain)
        source.check_compiled(model)
        with source.scope():
            self._plain = lower_step(model, batch, training=True, chip=chip)
        _check_trains(model)
        self._rules = with_rules_of(plan_of(strategy, 1), model).rules if strategy else None
        self.model, self.parameters = model.name, model.count_params()
        self.depth = 0 if all_blocks else self._depth(model)
        layers = layers_by_path(model)
        self.sees_batch = [
            layer.name for layer in layers.values() if isinstance(layer, keras.layers.BatchNormalization)
        ]
        self._paths = list(layers)
        self._forms: dict[Measures, _Form] = {}

    @property
    def batch(self) -> tuple[str, ...]:
        """Shape and dtype of each array of the batch."""
        return self._plain.batch

    def _depth(self, whole: keras.Model) -> int:
        depth = self._source.depth(whole)
        if depth <= DEEP:
            return 0
        try:
            few, many = (self._source.under(Measures(self._source.precision), blocks) for blocks in BLOCKS)
        except (TypeError, ValueError):
            return 0
        times = Fraction(depth - BLOCKS[0], BLOCKS[1] - BLOCKS[0])
        return depth if is_on_line(few, many, whole, times) else 0

    def helps(self, measures: Measures, measure: Measure) -> bool:
        """Whether a measure makes anything of the step smaller beside others, and can be taken with them."""
        if measure.policy and COMPUTES_IN[measure.policy] != COMPUTES_IN[measures.policy]:
            return False
        if measure.helps is not None:
            return measure.name in self._form(measures).helping
        if measure.policy and not self._source.is_function:
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
        form, plan = self._form(measures), place.plan(measures.strategy)
        others = (argument for argument in self._plain.arguments if argument.kind in ("metrics", "batch"))
        plan = plan and replace(plan, rules=self._rules)
        return memory_by_shapes([*form.arguments, *others], measures, plan, place.capacity)

    def compiler(
        self, place: Place, measures: Measures, whole: bool = False, origin: Place | None = None
    ) -> Callable[[], Compiled]:
        """Lowers the step, and returns a function that compiles it, for any thread.

        Args:
            whole: whether to compile with all blocks; otherwise with few of a deep model.
            origin: another chip that it is compiled for, whose kernels are those of this one; None for this one.

        Raises:
            ValueError: If the backend cannot trace the step.
        """
        lowered = self._lower(place, measures, whole, (origin or place).traced)
        target, plan = place.target, place.plan(measures.strategy)

        def compiled_until(until: str) -> Compiled:
            steps = [compile_step(step, (origin or place).target, self._flags, until) for step in lowered]
            reports = [report_on(replace(step, target=target), measures.policy, plan=plan) for step in steps]
            report = reports[0]
            if len(reports) > 1:
                report = extrapolated(reports[0], reports[1], BLOCKS, self.depth)
                advice = suggest(
                    *(report.matmuls, report.sensitive, report.memory, target, report.precision),
                    report.time.seconds if report.time else 0.0,
                )
                report = replace(report, advice=tuple(advice))
            if origin is not None:
                note = (
                    f"Compiled for {origin.title}, of the same architecture; times are at the rates of {place.title}."
                )
                report = replace(report, notes=(*report.notes, note))
            return Compiled(report, all(step.kept for step in steps), max(one.memory.peak for one in reports))

        def compiled() -> Compiled:
            result = compiled_until("memory")
            report = result.report
            if place.platform != "tpu" or report.refused:
                return result
            if self._code and report.memory.peak > ROOM_FOR_CODE * place.capacity and report.memory.fits:
                return compiled_until("code")
            without = () if report.memory.code else (WITHOUT_CODE,)
            return result._replace(report=replace(report, notes=(*report.notes, *without)))

        return compiled

    def _form(self, measures: Measures) -> _Form:
        """The model under those of the measures that decide its weights and slots, built once."""
        key = measures.state
        if key not in self._forms:
            with self._source.scope():
                model = self._source.under(key)
                if not model.optimizer.built:
                    model.optimizer.build(model.trainable_variables)
            kinds = {
                "parameters": model.trainable_variables,
                "state": model.non_trainable_variables,
                "optimizer": model.optimizer.variables,
            }
            arguments = tuple(_argument(kind, one) for kind, variables in kinds.items() for one in variables)
            helping = frozenset(one.name for one in MEASURES if one.helps is not None and one.helps(model))
            self._forms[key] = _Form(arguments, helping)
        return self._forms[key]

    def _weight(self, measures: Measures) -> int:
        return memory_by_shapes(self._form(measures).arguments, Measures(measures.precision), None, 0).peak

    def _lower(self, place: Place, measures: Measures, whole: bool, chip: TracedChip) -> list[Lowered]:
        """The lowered step, or of a deep model two; layers have the names of the plain model, where it has as many."""
        plan = place.plan(measures.strategy)
        key = (measures, chip, plan, whole)
        if key not in self._lowered:
            batch = _part(self._batch, self.rows, measures.micro_batches)
            models = [self._source.under(measures, n) for n in (BLOCKS if self.depth and not whole else (None,))]
            with self._source.scope():
                lowered = [lower_step(m, batch, training=True, chip=chip, plan=plan) for m in models]
            paths = list(layers_by_path(models[0]))
            names = dict(zip(paths, self._paths, strict=True)) if len(paths) == len(self._paths) else {}
            self._lowered[key] = [_named(step, self.model, names) for step in lowered]
        return self._lowered[key]


def _argument(kind: str, variable: keras.Variable) -> Argument:
    # Private: where `keras_mp.backend.keep_on_host` notes it, on JAX.
    on_host = getattr(getattr(variable, "_layout", None), "memory_kind", None) == "pinned_host"
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return Argument(kind, variable.path, tuple(variable.shape), dtype, on_host=on_host)


def _named(step: Lowered, model: str, names: Mapping[str, str]) -> Lowered:
    """A step with other names of the model and its layers: a model that is built again has others."""
    calls = tuple(replace(call, path=names.get(call.path, call.path)) for call in step.calls)
    return replace(step, model=model, calls=calls)


def _check_trains(model: keras.Model) -> None:
    """Checks that a model has a loss: without one Keras trains nothing, and says nothing."""
    cls = original_class(model)
    own = cls.train_step is not keras.Model.train_step or cls.compute_loss is not keras.Model.compute_loss
    if not own and getattr(model, "loss", None) is None and not model.losses:
        raise ValueError(f"model {model.name!r} has no loss, so that nothing trains: give compile() a loss")


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
