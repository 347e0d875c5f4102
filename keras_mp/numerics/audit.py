"""`audit`: one float32 run that predicts lower precisions' losses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.conversion.to_float32 import computes_in_float32, in_float32
from keras_mp.loss_scaling.loss_scale import LossScale
from keras_mp.numerics import verdict
from keras_mp.numerics.audit_report import AuditReport, LayerAudit
from keras_mp.numerics.data import batches_of, check_labels, check_model, trains_itself
from keras_mp.numerics.observe import Call, ObservedStep, Record
from keras_mp.numerics.ranges import Range, merged, sampled
from keras_mp.numerics.response import Responses, responses
from keras_mp.precision.formats import FLOAT16
from keras_mp.qat.quantization_aware import CONFIGS, LOW_SQNR, decisions
from keras_mp.rebuild.walk import Walk, layers_by_path, own_variables
from keras_mp.reporting.progress import progress
from keras_mp.system.argument_checks import whole_number

SAMPLE = 8192
# What a later, larger gradient has room to grow by before the recommended scale makes it overflow.
HEADROOM = 16.0


def audit(model: keras.Model, batches: Any, steps: int = 8, *, sample: int | None = SAMPLE) -> AuditReport:
    """Predicts what lower precisions would lose, layer by layer.

    The model runs forward and backward in float32. No weight changes. A model in another precision computes in float32
    meanwhile; afterwards it is what it was.

    Args:
        model: a built Keras model with a loss, from `compile(loss=...)` or a `compute_loss` of its own. A `train_step`
            of its own is not run.
        batches: batches `(x, y)` or `(x, y, sample_weight)`, as `fit` takes them, or one such tuple of arrays.
        steps: the number of batches to look at; fewer are fine.
        sample: the largest number of values of a tensor that are rounded: of a larger tensor so many, spread evenly;
            the lowest and the highest are those of all. None rounds every value, and takes longer.

    Returns:
        The report: print it, or `to_html(path)`.

    Raises:
        TypeError: If model is no Keras model, or batches holds none.
        ValueError: If the model is not built or has no loss, or if batches is empty, or does not fit the model or its
            loss.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="dense")])
        >>> model.compile("adam", "mse")
        >>> report = keras_mp.audit(model, [(1e6 * np.ones((16, 8)), np.ones((16, 4)))])  # past float16's 65504
        >>> [layer.path for layer in report.suspects("mixed_float16")]
        ['dense']
        >>> report.suspects("mixed_bfloat16")
        []
    """
    check_model(model)
    if sample is not None:
        sample = whole_number("sample", sample, unit="values", otherwise="or None for all")
    batches = batches_of(batches, steps)
    for batch in batches:
        check_labels(model, batch)
    layers = Walk(model).every
    wide = {id(layer) for layer in layers if layer.compute_dtype == "float32"}
    with in_float32(model), progress("audit", len(batches) + 1) as tell:
        tell("one step in float32")
        run = _Run(model, sample)
        for batch in batches:
            run.take(batch)
            tell("steps in float32", 1)
        tell("each layer once in 16 bits")
        # Where others are in 16 bits, a layer in float32 is so for a reason.
        answers = responses(model, batches[0], wide if len(wide) < len(layers) else set())
    return run.report(answers)


class _Run:
    """The sums of an audit over its steps."""

    def __init__(self, model: keras.Model, sample: int | None) -> None:
        self.model, self.sample = model, sample
        self.step = ObservedStep(model, partial(_finish, sample))
        self.scale = math.inf
        self.largest_gradient = 0.0
        self.losses: list[float] = []
        self.ranges: dict[tuple[str, int], Range] = {}
        self.weights = {id(v): place for place, v in enumerate(model.trainable_variables)}
        for place, variable in enumerate(model.trainable_variables):  # which no step changes
            x = np.asarray(variable.value, "float32")
            ends = (float(x.min()), float(x.max())) if x.size else None
            self._range("kernel", place).update(sampled(x, sample, np.ravel), size=x.size, extremes=ends)

    def take(self, batch: tuple) -> None:
        result = self.step(batch)
        self.losses.append(float(result["loss"]))
        layout = self.step.record.layout
        parts = np.split(result["values"], np.cumsum([count for *_, count in layout])[:-1])
        ends = result["ends"].tolist()
        gradients = [pair for (kind, *_), pair in zip(layout, ends, strict=True) if "gradient" in kind]
        sizes = [abs(end) for pair in gradients for end in pair if math.isfinite(end)]
        self.largest_gradient = max([self.largest_gradient, *sizes])
        self.scale = min(self.scale, _recommended(self.largest_gradient))  # as a dynamic loss scale falls
        for (kind, _), measured in self.ranges.items():
            if "gradient" in kind:
                measured.scales["float16"] = self.scale
        for (kind, place, size, _), values, (low, high) in zip(layout, parts, ends, strict=True):
            self._range(kind, place).update(values, size=size, extremes=(low, high))

    def _range(self, kind: str, place: int) -> Range:
        """The range of a tensor, made where it has none."""
        if (kind, place) not in self.ranges:
            scales: dict[str, float | None] = {"E4M3": None, "E5M2": None}
            self.ranges[kind, place] = Range({**scales, "float16": self.scale} if "gradient" in kind else scales)
        return self.ranges[kind, place]

    def report(self, responses: Responses) -> AuditReport:
        record = self.step.record
        layers: dict[str, LayerAudit] = {}
        calls: dict[str, list[Call]] = {}
        for call in record.calls:
            if not isinstance(call.layer, keras.Model) and (call.outputs or call.inputs):
                calls.setdefault(call.path, []).append(call)
        for path, made in calls.items():
            layers[path] = self._layer(path, made, responses.get(path, {}))
        # A model is no layer, and has code of its own where it is subclassed.
        for path in responses.keys() - layers.keys():
            model = layers_by_path(self.model).get(path, self.model)
            audited = self._layer(path or model.name, [Call(path, model)], responses[path])
            if not audited.verdicts["mixed_bfloat16"].ok or not audited.verdicts["mixed_float16"].ok:
                layers[path] = audited
        notes = _notes(self.model, self.losses, self.ranges, self.sample)
        loss = float(np.mean(self.losses))
        steps = len(self.losses)
        quantized, rows = _quantized(self.model), list(layers.values())
        return AuditReport(self.model.name, steps, loss, self.scale, rows, notes, quantized)

    def _layer(self, path: str, calls: list[Call], response: dict[str, float | str]) -> LayerAudit:
        layer = calls[0].layer
        audited = LayerAudit(path, type(layer).__name__, len(calls))
        tensors = {
            "input": [place for call in calls for place in call.inputs],
            "output": [place for call in calls for place in call.outputs],
        }
        for call in calls:
            for name, place in call.inner.items():
                tensors.setdefault(name, []).append(place)
        own = own_variables(layer) if isinstance(layer, keras.layers.Layer) else []
        kernels = [self.weights[id(v)] for v in own if id(v) in self.weights]
        keys = {role: [("output", place) for place in dict.fromkeys(places)] for role, places in tensors.items()}
        keys["output gradient"] = [("output gradient", place) for place in dict.fromkeys(tensors["output"])]
        keys["kernel"] = [("kernel", place) for place in kernels]
        keys["kernel gradient"] = [("kernel gradient", place) for place in kernels]
        for role, wanted in keys.items():
            there = [self.ranges[key] for key in wanted if key in self.ranges]
            if there:
                audited.ranges[role] = merged(there) if len(there) > 1 else there[0]
        audited.verdicts = {
            "mixed_float16": verdict.float16(layer, audited.ranges, self.scale, response.get("float16")),
            "mixed_bfloat16": verdict.bfloat16(layer, audited.ranges, response.get("bfloat16")),
            "fp8": verdict.fp8(layer, audited.ranges),
        }
        audited.response = response
        return audited


def _finish(
    sample: int | None, record: Record, loss: Any, tensors: list[Any], tapped: list[Any], gradients: list[Any]
) -> dict[str, Any]:
    """The extremes and a sample of each tensor seen."""
    wanted = sorted({place for call in record.calls for place in (*call.inputs, *call.outputs, *call.inner.values())})
    views = [("output", place, tensors[place]) for place in wanted]
    views += [("output gradient", place, tapped[place]) for place in wanted if tapped[place] is not None]
    views += [("kernel gradient", place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
    views = [view for view in views if math.prod(view[2].shape)]
    values, ends, layout = [], [], []
    for kind, place, x in views:
        x = ops.cast(x, "float32")
        part = sampled(x, sample, lambda x: ops.reshape(x, (-1,)))
        values.append(part)
        ends.append(ops.stack([ops.min(x), ops.max(x)]))
        layout.append((kind, place, math.prod(x.shape), part.shape[0]))
    record.layout = layout
    return {"loss": loss, "values": ops.concatenate(values), "ends": ops.stack(ends)}


def _recommended(largest: float) -> float:
    """The largest power of two that leaves such gradients `HEADROOM`."""
    default = LossScale()
    if not largest:
        return default.initial_scale
    room = FLOAT16.max / (largest * HEADROOM)
    scale = math.ldexp(0.5, math.frexp(room)[1]) if math.isfinite(room) else math.inf
    return min(max(scale, default.min_scale), default.max_scale)


def _quantized(model: keras.Model) -> dict[str, str]:
    """A sentence about each of Keras's quantizations that costs much."""
    said = {}
    for scaling, made in CONFIGS.items():
        rows = decisions(Walk(model), scaling)
        if low := sum(bool(row.treatments) for row in rows):
            said[made().mode] = (
                f"quantized at once, the weights of {low} of {len(rows)} layers keep less than {LOW_SQNR:.0f} dB; "
                f"convert(model, {scaling!r}) lets them train for it"
            )
    return said


def _notes(
    model: keras.Model,
    losses: list[float],
    ranges: dict[tuple[str, int], Range],
    sample: int | None,
) -> list[str]:
    notes = []
    if not computes_in_float32(model):
        notes.append("For the audit the model ran in float32; its own precision is restored.")
    if trains_itself(model):
        notes.append("The model has a train_step of its own, which was not run: compute_loss was differentiated.")
    if not all(map(math.isfinite, losses)) or any(values.nonfinite for values in ranges.values()):
        notes.append(
            "Values are infinite or NaN in float32 already, and were left out: see keras_mp.numerics.find_nonfinite."
        )
    if sample is not None:
        notes.append(f"Tensors of more than {sample:,} values were judged by a sample of about as many.")
    return notes
