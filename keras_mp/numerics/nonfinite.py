"""Finds the first nonfinite value of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.conversion.to_float32 import computes_in_float32, in_float32
from keras_mp.numerics.data import batches_of, check_labels, check_model, dense_array
from keras_mp.numerics.observe import Call, ObservedStep, Record
from keras_mp.numerics.plain_step import described
from keras_mp.precision.formats import FORMATS
from keras_mp.rebuild.walk import layers_by_path, own_variables
from keras_mp.reporting import remedies

LOWER_SCALE = "lower the loss scale"
FLOAT32 = "float32 for this layer"
BAD_WEIGHT = "a bad weight"
BAD_RECORD = "a bad input record"
ARITHMETIC = "the layer's own arithmetic"


@dataclass
class NonFinite:
    """The first infinite value, or NaN, of a step.

    Attributes:
        path: the path of the layer, the names that lead to it joined with `/`; "" where it is no layer's.
        tensor: "input", "output", "weight NAME", "output gradient", "input gradient", "gradient of weight NAME", "x",
            "y", "sample_weight" or "loss".
        kind: "Inf", "NaN", or "Inf and NaN".
        count: the number of values of the tensor that are not finite.
        backward: whether it came up in the backward pass.
        given: the lowest and the highest finite value of each tensor that went in, by name.
        remedy: one of "lower the loss scale", "float32 for this layer", "a bad weight", "a bad input record", "the
            layer's own arithmetic".
        advice: a sentence that says what to do.
        records: places in the batch of the bad records.
        scale: the loss scale of the step.
        fitting_scale: the largest power of two below it at which all is finite, where the loss scale alone causes it;
            a dynamic one gets over it. None elsewhere.
        operation: the operation of the forward pass, where code outside Keras calls it: the backend's name of the
            operation, the file, the line, and its text; "" elsewhere.
    """

    path: str
    tensor: str
    kind: str
    count: int
    backward: bool
    given: dict[str, tuple[float, float]]
    remedy: str
    advice: str
    records: list[int] = field(default_factory=list)
    scale: float = 1.0
    fitting_scale: float | None = None
    operation: str = ""

    def __str__(self) -> str:
        where = f"{self.tensor} of layer {self.path!r}" if self.path else self.tensor
        lines = [
            f"{self.kind} in the {'backward' if self.backward else 'forward'} pass, first in {where}: "
            f"{self.count} value{'s' if self.count > 1 else ''}"
        ]
        if self.operation:
            lines.append(f"Operation: {self.operation}")
        if self.given:
            ends = (f"{name} from {low:.4g} to {high:.4g}" for name, (low, high) in self.given.items())
            what = "layer" if self.operation else "operation"
            lines.append(f"Finite inputs of that {what}: {', '.join(ends)}")
        return "\n".join([*lines, f"Remedy: {self.remedy}. {self.advice}"])


class _Seen(NamedTuple):
    """The values of a tensor, summed up."""

    nan: int
    inf: int
    low: float
    high: float

    @property
    def bad(self) -> bool:
        return bool(self.nan or self.inf)

    @property
    def kind(self) -> str:
        return "Inf and NaN" if self.nan and self.inf else "NaN" if self.nan else "Inf"


class _Event(NamedTuple):
    """A tensor that is not finite, and its time."""

    when: int
    nonfinite: NonFinite
    place: int


def find_nonfinite(model: keras.Model, batch: Any, loss_scale: float | None = None) -> NonFinite | None:
    """Finds the first infinite or NaN value of a step.

    It may arise in the forward or in the backward pass. The step runs in the model's own precision, with the loss scale
    of its optimizer. No weight changes.

    Args:
        model: a built Keras model with a loss, as for `audit`.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        loss_scale: the number that the loss is multiplied by; the optimizer's current scale by default, 1 where it has
            none.

    Returns:
        What was found, to print; None where the loss and every gradient are finite.

    Raises:
        TypeError: If model is no Keras model, or batch no tuple.
        ValueError: If the model is not built or has no loss; if the batch is empty or does not fit; if loss_scale is
            not a positive finite number.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> inputs = keras.Input((4,))
        >>> model = keras.Model(inputs, keras.ops.log(keras.layers.Dense(2, kernel_initializer="zeros")(inputs)))
        >>> model.compile("sgd", "mse")
        >>> keras_mp.numerics.find_nonfinite(model, (np.ones((2, 4)), np.ones((2, 2)))).kind
        'Inf'
    """
    check_model(model)
    given = batches_of([batch], 1, "batch")[0]
    check_labels(model, given)
    scale = _scale_of(model, loss_scale)
    step = _Step(model)
    first = step.run(given, scale)
    if first.finite:
        return None
    weights, states = _bad_variables(model)
    nonfinite = _bad_record(given) or (_bad_weight(*weights[0]) if weights else None)
    if nonfinite is None:
        with _made_finite(states):
            second = step.run(given, scale) if states else first
            if not second.finite and second.place == first.place:
                nonfinite = _explained_step(step, given, scale, second)
                if states:
                    path, variable = states[0]
                    nonfinite.advice += (
                        f" Weight {variable.name} of layer {path!r} is not finite either, but is not the cause here: "
                        "load a checkpoint in which it is finite. "
                        f"{remedies.KEEP_STATISTICS} keeps moving statistics finite."
                    )
                return nonfinite
        path = first.first().path
        nonfinite = _bad_weight(*next((state for state in states if state[0] == path), states[0]))
    nonfinite.scale = scale
    return nonfinite


def _explained_step(step: _Step, batch: tuple, scale: float, first: _Outcome) -> NonFinite:
    """The fault of a step with finite data and weights."""
    if scale != 1.0 and first.forward_finite:
        lower = scale
        while lower > 1.0:
            lower = max(1.0, lower / 2)
            if step.run(batch, lower).finite:
                nonfinite = first.first()
                halvings = round(math.log2(scale / lower))
                nonfinite.remedy = LOWER_SCALE
                nonfinite.scale, nonfinite.fitting_scale = scale, lower
                nonfinite.advice = (
                    f"This is normal while the scale is found: at a loss scale of {lower:g} the step is finite, at "
                    f"{scale:g} it is not. A dynamic scale is lowered to it by {halvings} skipped "
                    f"step{'s' if halvings > 1 else ''}; a static one is too high."
                )
                return nonfinite
        first = step.run(batch, 1.0)
        scale = 1.0
    nonfinite = first.first()
    nonfinite.scale = scale
    nonfinite.operation = step.operation(batch, scale, first)
    _advise(nonfinite, step.model, batch)
    return nonfinite


def _scale_of(model: keras.Model, loss_scale: Any) -> float:
    if loss_scale is not None:
        known = isinstance(loss_scale, (int, float, np.number)) and not isinstance(loss_scale, bool)
        if not known or not 0 < loss_scale < math.inf:
            raise ValueError(f"loss_scale={loss_scale!r} must be a positive finite number")
        return float(loss_scale)
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return 1.0
    if not optimizer.built:
        return float(optimizer.initial_scale)
    return float(np.asarray(optimizer.dynamic_scale.value))


class _Step:
    """A step that counts what is not finite."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._observed = ObservedStep(model, _finish, tap_inputs=True)

    def run(self, batch: tuple, scale: float) -> _Outcome:
        result = self._observed(batch, scale)
        return _Outcome(self.model, self._observed.record, float(result["loss"]), result["seen"])

    def operation(self, batch: tuple, scale: float, outcome: _Outcome) -> str:
        """Operation of the first nonfinite value, in words, or ""."""
        event = outcome.first_forward()
        operation = None if event is None else self._observed.operation(batch, scale, event.place)
        return "" if operation is None else described(*operation)


def _finish(record: Record, loss: Any, tensors: list[Any], tapped: list[Any], gradients: list[Any]) -> Any:
    views = [("tensor", place, x) for place, x in enumerate(tensors)]
    views += [("gradient", place, x) for place, x in enumerate(tapped) if x is not None]
    views += [("weight", place, x) for place, x in enumerate(gradients) if x is not None]
    views = [view for view in views if math.prod(view[2].shape)]
    record.layout = [(kind, place) for kind, place, _ in views]
    return {"loss": loss, "seen": ops.stack([_look(x) for *_, x in views])}


def _look(x: Any) -> Any:
    x = ops.cast(x, "float32")
    finite = ops.isfinite(x)
    bad = (ops.sum(ops.cast(kind, "float32")) for kind in (ops.isnan(x), ops.isinf(x)))
    return ops.stack([*bad, ops.min(ops.where(finite, x, math.inf)), ops.max(ops.where(finite, x, -math.inf))])


class _Outcome:
    """A step's tensors; the first that is not finite."""

    def __init__(self, model: keras.Model, record: Record, loss: float, seen: np.ndarray) -> None:
        self._model, self._record, self._loss = model, record, loss
        self._seen = {
            key: _Seen(int(nan), int(inf), float(low), float(high))
            for key, (nan, inf, low, high) in zip(record.layout, seen, strict=True)
        }
        self._readers: dict[int, list[Call]] = {}
        for call in record.calls:
            for place in call.inputs:
                source = record.sources[place]
                if source is not None:
                    self._readers.setdefault(source, []).append(call)

    @property
    def forward_finite(self) -> bool:
        return math.isfinite(self._loss)

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradients of all weights are."""
        gradients = (seen for (kind, _), seen in self._seen.items() if kind == "weight")
        return self.forward_finite and not any(seen.bad for seen in gradients)

    @property
    def place(self) -> tuple[str, str, str]:
        """Layer, tensor and kind of the first value."""
        first = self.first()
        return first.path, first.tensor, first.kind

    def first_forward(self) -> _Event | None:
        """First tensor of the forward pass that is not finite."""
        events = [] if self.forward_finite else self._forward()
        return min(events, key=lambda event: event.when, default=None)

    def first(self) -> NonFinite:
        """Where the first value that is not finite comes up."""
        forward = self.first_forward()
        if forward is not None:
            return forward.nonfinite
        if not self.forward_finite:
            last = max(self._record.calls, key=lambda call: call.ended, default=None)
            given = self._ends("the model's output", last.outputs) if last is not None else {}
            kind = "NaN" if math.isnan(self._loss) else "Inf"
            return NonFinite("", "loss", kind, 1, False, given, ARITHMETIC, "")
        backward = min(self._backward(), key=lambda event: event.when, default=None)
        return backward.nonfinite if backward is not None else NonFinite("", "loss", "NaN", 1, True, {}, ARITHMETIC, "")

    def _forward(self) -> Iterator[_Event]:
        for call in self._record.calls:
            for tensor, places, when in (("input", call.inputs, call.began), ("output", call.outputs, call.ended)):
                readers = [call] if tensor == "input" else []
                if not any(self._tensor(p).bad for p in places) or all(self._harmless(p, readers) for p in places):
                    continue
                source = call.inputs if tensor == "output" else []
                given = self._ends("input", source) if source else self._ends("the rest of the input", places)
                given |= self._weight_ends(call) if tensor == "output" else {}
                yield from self._event(call, tensor, "tensor", places, given, when)

    def _event(
        self, call: Call, tensor: str, kind: str, places: list[int], given: dict[str, tuple[float, float]], when: int
    ) -> Iterator[_Event]:
        """An event where one of these tensors is not finite."""
        bad = {place: seen for place in places if (seen := self._seen.get((kind, place))) is not None and seen.bad}
        if bad:
            first, count = next(iter(bad)), sum(seen.nan + seen.inf for seen in bad.values())
            backward = kind != "tensor"
            yield _Event(when, NonFinite(call.path, tensor, bad[first].kind, count, backward, given, "", ""), first)

    def _harmless(self, place: int, readers: list[Call]) -> bool:
        """Whether all readers put out finite values: a mask."""
        readers = [call for call in readers or self._readers.get(place, []) if call.outputs]
        return bool(readers) and all(not self._tensor(p).bad for call in readers for p in call.outputs)

    def _backward(self) -> Iterator[_Event]:
        places = {id(v): place for place, v in enumerate(self._model.trainable_variables)}
        for call in self._record.calls:
            given = {**self._ends("input", call.inputs), **self._weight_ends(call)}
            given |= self._ends("output gradient", call.outputs, "gradient")
            events = [
                ("output gradient", "gradient", call.outputs, 2 * -call.ended),
                ("input gradient", "gradient", call.inputs, 2 * -call.began),
            ]
            own = own_variables(call.layer) if isinstance(call.layer, keras.layers.Layer) else []
            for variable in own:
                if id(variable) in places:  # of two that come up at once, the input's gradient is the one that spreads
                    name = f"gradient of weight {variable.name}"
                    events.append((name, "weight", [places[id(variable)]], 2 * -call.began + 1))
            for tensor, kind, where, when in events:
                yield from self._event(call, tensor, kind, where, given, when)

    def _tensor(self, place: int) -> _Seen:
        return self._seen.get(("tensor", place), _Seen(0, 0, 0.0, 0.0))

    def _ends(self, name: str, places: list[int], kind: str = "tensor") -> dict[str, tuple[float, float]]:
        seen = [self._seen[kind, place] for place in places if (kind, place) in self._seen]
        low = min((record.low for record in seen), default=math.inf)
        return {name: (low, max(record.high for record in seen))} if math.isfinite(low) else {}

    @staticmethod
    def _weight_ends(call: Call) -> dict[str, tuple[float, float]]:
        extremes = {}
        for variable in own_variables(call.layer) if isinstance(call.layer, keras.layers.Layer) else []:
            values = _values(variable)
            if values is not None and values.size:
                extremes[variable.name] = (float(values.min()), float(values.max()))
        return extremes


def _values(variable: Any) -> np.ndarray | None:
    """The values of a variable of floats, in float32."""
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype)):
        return None
    return np.asarray(ops.cast(variable.value, "float32"))


def _found_in(values: np.ndarray, path: str, tensor: str, name: str, remedy: str, advice: str) -> NonFinite:
    """The fault of values that are there before the step."""
    finite = np.isfinite(values)
    good = values[finite]
    given = {f"the rest of {name}": (float(good.min()), float(good.max()))} if good.size else {}
    kind = _Seen(int(np.isnan(values).sum()), int(np.isinf(values).sum()), 0.0, 0.0).kind
    return NonFinite(path, tensor, kind, int((~finite).sum()), False, given, remedy, advice)


def _bad_record(batch: tuple) -> NonFinite | None:
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=True):
        for leaf in keras.tree.flatten(part):
            if leaf is None or not np.issubdtype((values := np.asarray(backend.values_of(leaf))).dtype, np.floating):
                continue
            if np.isfinite(values).all():
                continue
            values = dense_array(leaf)
            records = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
            some = ", ".join(map(str, records[:10])) + (", ..." if len(records) > 10 else "")
            advice = f"Remove or repair record {some} of {name} in this batch, counted from 0."
            nonfinite = _found_in(values, "", name, name, BAD_RECORD, advice)
            nonfinite.records = records
            return nonfinite
    return None


BadVariable = tuple[str, Any]  # the path of its layer, and the variable


def _bad_variables(model: keras.Model) -> tuple[list[BadVariable], list[BadVariable]]:
    """The variables that are not finite: those trained, the others."""
    trained = {id(variable) for variable in model.trainable_variables}
    weights: list[BadVariable] = []
    states: list[BadVariable] = []
    for path, layer in [*layers_by_path(model).items(), ("", model)]:
        for variable in own_variables(layer):
            values = _values(variable)
            if values is not None and not np.isfinite(values).all():
                (weights if id(variable) in trained else states).append((path, variable))
    return weights, states


@contextmanager
def _made_finite(states: list[BadVariable]) -> Iterator[None]:
    """Gives variables 1 for what is not finite."""
    # Only a step can tell whether it reads them: moving statistics that a skipped step left NaN are read in inference.
    before = [ops.copy(variable.value) for _, variable in states]
    try:
        for _, variable in states:
            values = ops.cast(variable.value, "float32")
            variable.assign(ops.where(ops.isfinite(values), values, 1.0))
        yield
    finally:
        for (_, variable), value in zip(states, before, strict=True):
            variable.assign(value)


def _bad_weight(path: str, variable: Any) -> NonFinite:
    values = np.asarray(ops.cast(variable.value, "float32"))
    place = tuple(int(axis[0]) for axis in np.nonzero(~np.isfinite(values)))
    advice = (
        f"Element {place} is the first. Load a checkpoint in which the weight is finite, and train on with "
        "keras_mp.LossScaleOptimizer, which skips a step whose gradients are not finite"
        + ("." if variable.trainable else f"; {remedies.KEEP_STATISTICS} keeps moving statistics finite too.")
    )
    return _found_in(values, path, f"weight {variable.name}", variable.name, BAD_WEIGHT, advice)


def _advise(nonfinite: NonFinite, model: keras.Model, batch: tuple) -> None:
    """Says whether the precision or the arithmetic is at fault."""
    layer = layers_by_path(model).get(nonfinite.path)
    dtype = getattr(layer, "compute_dtype", "float32" if computes_in_float32(model) else "")
    where = "" if nonfinite.backward else " before it"
    arithmetic = (
        f"It is not finite in float32 either: look for a division by zero, a logarithm or root of 0, or an exponential "
        f"of a large number{where}, and keep its argument away from there: an epsilon, keras.ops.clip, "
        "keras.ops.maximum. A square root, a norm and a power below 1 have an infinite derivative at 0"
    )
    fits = False
    if not computes_in_float32(model):
        with in_float32(model):
            fits = _Step(model).run(batch, 1.0).finite
    if not fits:
        nonfinite.remedy, nonfinite.advice = ARITHMETIC, arithmetic + "."
        return
    nonfinite.remedy = FLOAT32
    limit = f", whose largest number is {FORMATS[dtype].max:g}" if dtype in FORMATS else ""
    lower = " (or a loss scale below 1)" if nonfinite.backward else ""
    nonfinite.advice = (
        f"In float32 the step is finite. Give the layer {remedies.FLOAT32_LAYER}{lower}, or make its values smaller"
        + (f": it computes in {dtype}{limit}" if dtype and dtype != "float32" else "")
        + "; keras_mp.audit shows which other layers come close."
    )
