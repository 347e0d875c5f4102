"""The training step of one model and batch under any measures, for any chip: lowered here, compiled elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import keras

from keras_mp.advice.fewer_blocks import BLOCKS, DEEP, is_on_line
from keras_mp.advice.figures import Figures, extrapolated, state_figures, with_names
from keras_mp.advice.measures import Measures, Possible
from keras_mp.advice.place import Place
from keras_mp.advice.source import Source
from keras_mp.backend.common.lowered import Argument, Lowered
from keras_mp.precision.chips import Chip
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class
from keras_mp.reporting.text import shorten_middle
from keras_mp.xla.compile import compile_step
from keras_mp.xla.compile_report import CompileReport
from keras_mp.xla.inspect import report_on
from keras_mp.xla.lower import lower_step

# With more of a TPU's memory the code decides whether the step fits: 44 to 562 MiB of 16 GiB, in 20 deep models' steps.
_ROOM_FOR_CODE = 0.85
_WITHOUT_CODE = (
    "The TPU's compiler was ended when it had assigned memory, before it generated code: the program itself, a few "
    "hundred MiB, is not counted."
)


_LARGEST = 5  # arrays


class Step:
    """One model and batch.

    Args:
        source: where the model comes from.
        batch: what one update is made of, on all devices: shapes.
        platform: what the step is lowered for where it is only looked at.

    Attributes:
        model: its name.
        parameters: elements of its weights that train.
        depth: how many blocks it has, where the figures are taken from models with fewer; 0 where not.
        rows: of the batch.
        sees_batch: names of its layers that compute statistics of a batch.

    Raises:
        ValueError: If the model is not built or not compiled, or the batch does not fit it.
    """

    def __init__(self, source: Source, batch: Any, platform: str) -> None:
        self._source, self._batch = source, batch
        self.rows = _rows(batch)
        self._lowered: dict[tuple[Any, ...], tuple[list[Lowered], list[str]]] = {}
        plain = Measures(source.precision)
        model = source.under(plain)
        source.check_compiled(model)
        with source.scope():
            self._plain = lower_step(model, batch, training=True, platform=platform)
        _check_trains(model)
        self.model, self.parameters = model.name, model.count_params()
        self.depth = self._depth(model)
        layers = layers_by_path(model)
        self.sees_batch = [
            layer.name for layer in layers.values() if isinstance(layer, keras.layers.BatchNormalization)
        ]
        self._paths = list(layers)
        self._slots = {"": [argument for argument in self._plain.arguments if argument.kind == "optimizer"]}

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

    def possible(self, precision: str, devices: int) -> Possible:
        """What can be taken of this model on so many devices."""
        lean, remat = self._source.forms(precision)
        return Possible(precision, self.rows // devices, lean, remat, self.has_smaller_states)

    @property
    def has_smaller_states(self) -> bool:
        """Whether the optimizer has slots that take less memory in 8 bits."""
        small, plain = (
            state_figures(self._arguments(dtype), Measures(self._source.precision), None).optimizer
            for dtype in ("float8", "")
        )
        return small < plain

    def state(self, place: Place, measures: Measures) -> Figures:
        """What shapes alone say."""
        return state_figures(self._arguments(measures.state_dtype), measures, place.plan(measures.strategy))

    def compiler(self, place: Place, measures: Measures, whole: bool = False) -> Callable[[], Figures]:
        """Lowers the step, and returns a function that compiles it, for any thread.

        Args:
            place, measures: the chip, and what is changed of the step.
            whole: whether with all blocks; otherwise of a deep model few.

        Raises:
            ValueError: If the backend cannot trace the step.
        """
        lowered, paths = self._lower(place, measures, whole)
        target, plan = place.target, place.plan(measures.strategy)

        def figures_until(until: str) -> Figures:
            steps = [compile_step(step, target, until=until) for step in lowered]
            reports = [report_on(step, measures.precision, plan=plan) for step in steps]
            figures = [figures_of(report, place.chip) for report in reports]
            one = figures[0] if len(figures) == 1 else extrapolated(figures[0], figures[1], BLOCKS, self.depth)
            return replace(one, kept=all(step.kept for step in steps))

        def compiled() -> Figures:
            figures = figures_until("memory")
            if place.platform == "tpu" and _ROOM_FOR_CODE < figures.peak / place.capacity <= 1:
                figures = figures_until("code")
            elif place.platform == "tpu" and figures.flops is not None:  # not refused
                figures = replace(figures, notes=(*figures.notes, _WITHOUT_CODE))
            return with_names(figures, dict(zip(paths, self._paths, strict=True)) if paths else {})

        return compiled

    def _arguments(self, state_dtype: str) -> Sequence[Argument]:
        """The arguments of the plain step, with the optimizer's slots stored in a dtype."""
        if state_dtype not in self._slots:
            self._slots[state_dtype] = self._source.slots(state_dtype) or self._slots[""]
        other = (argument for argument in self._plain.arguments if argument.kind != "optimizer")
        return [*self._slots[state_dtype], *other]

    def _lower(self, place: Place, measures: Measures, whole: bool) -> tuple[list[Lowered], list[str]]:
        """The lowered step, or of a deep model two; and the paths of layers where they are those of the plain model."""
        plan = place.plan(measures.strategy)
        key = (measures, place.platform, plan, whole)
        if key not in self._lowered:
            batch = _part(self._batch, self.rows, measures.micro_batches)
            models = [self._source.under(measures, n) for n in (BLOCKS if self.depth and not whole else (None,))]
            with self._source.scope():
                lowered = [lower_step(m, batch, training=True, platform=place.platform, plan=plan) for m in models]
            paths = list(layers_by_path(models[0]))
            self._lowered[key] = lowered, paths if len(paths) == len(self._paths) else []
        return self._lowered[key]


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
    )


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
