"""One training step, seen from within."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.numerics.nonfinite_origin import Frame, Tap
from keras_mp.numerics.plain_step import explained, given_of, loss_of
from keras_mp.rebuild.walk import Walk, layers_by_path

engine = backend.engine_of(__package__)


@dataclass
class Call:
    """One call of a layer or operation in a step.

    Float tensors are named by their places in `Record.tensors`.
    """

    path: str  # names that lead to the layer, joined with `/`; "" for the model itself
    layer: keras.Operation  # the live layer
    inputs: list[int] = field(default_factory=list)  # what went in, cast as the layer casts it
    outputs: list[int] = field(default_factory=list)
    inner: dict[str, int] = field(default_factory=dict)  # what is inside: "before activation", "scores"
    began: int = -1  # the time at which the call began, counted in begins and ends of calls
    ended: int = -1  # the time at which it ended; a layer inside another ends before it


@dataclass
class Record:
    """Calls and tensors of a step, while it is traced."""

    calls: list[Call] = field(default_factory=list)  # the calls, in the order in which they began
    tensors: list[Any] = field(default_factory=list)  # each tensor once
    # the place of each tensor's gradient among those of the step, or None
    taps: list[int | None] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # shape of each tensor
    # the place of the tensor that a tapped copy was copied from, for each tensor, or None
    sources: list[int | None] = field(default_factory=list)
    layout: Any = None  # anything that finish notes of what it returns


class _Recorder:
    def __init__(self, tap: Tap, tap_inputs: bool) -> None:
        self.record, self._tap, self._tap_inputs = Record(), tap, tap_inputs
        self._places: dict[int, int] = {}
        self._tapped = self._clock = 0
        self._open: list[Call] = []

    def wrap(self, path: str, layer: keras.Operation, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "activation":
            return self._before(layer, function, "before activation", lambda x, *_: x)
        if name == "_compute_attention":
            return self._before(layer, function, "scores", functools.partial(_scores, layer))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = Call(path, layer, began=self._tick())
            self.record.calls.append(made)
            self._open.append(made)
            try:
                args, kwargs = keras.tree.map_structure(functools.partial(self._enter, made), (args, kwargs))
                result = function(*args, **kwargs)
                return keras.tree.map_structure(functools.partial(self._leave, made), result)
            finally:
                self._open.pop()
                made.ended = self._tick()

        return call

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _before(self, layer: keras.Operation, function: Callable[..., Any], name: str, read: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._open and self._open[-1].layer is layer:
                x = read(*args, *kwargs.values())
                place = self._keep(x) if is_float_tensor(x) else None
                if place is not None:
                    self._open[-1].inner[name] = place
            return function(*args, **kwargs)

        return call

    def _enter(self, made: Call, x: Any) -> Any:
        if not is_float_tensor(x):
            return x
        stored = backend.values_of(x)
        if stored is x:  # a sparse or ragged tensor has no gradient to be observed
            x = stored = self._observe(x, tapped=True) if self._tap_inputs else x
        place = self._keep(stored)
        if place is not None and place not in made.inputs:
            made.inputs.append(place)
        return x

    def _leave(self, made: Call, x: Any) -> Any:
        if not is_float_tensor(x):
            return x
        if (stored := backend.values_of(x)) is not x:
            place = self._keep(stored)
            made.outputs += [] if place is None else [place]
            return x
        known = self._places.get(id(x))
        fresh = known is None or self.record.taps[known] is None or self._tap_inputs
        tapped = self._observe(x, tapped=fresh)
        place = self._keep(tapped)
        if place is not None:
            made.outputs.append(place)
        return tapped

    def _observe(self, x: Any, tapped: bool) -> Any:
        """Taps a tensor, where it can be."""
        y = self._tap(x, True) if tapped else None
        if y is None:
            return x
        for name in ("_keras_logits", "_keras_mask"):  # what Keras hangs onto a tensor
            if hasattr(x, name):
                setattr(y, name, getattr(x, name))
        source = self._places.get(id(x))
        self._places[id(y)] = len(self.record.tensors)
        self._add(y, self._tapped, source)
        self._tapped += 1
        return y

    def _keep(self, x: Any) -> int | None:
        known = self._places.get(id(x))
        if known is None and self._tap(x, False) is not None:
            known = self._places[id(x)] = len(self.record.tensors)
            self._add(x, None, None)
        return known

    def _add(self, x: Any, tap: int | None, source: int | None) -> None:
        self.record.tensors.append(x)  # also keeps it alive, so that no other gets its id
        self.record.taps.append(tap)
        self.record.shapes.append(tuple(x.shape))
        self.record.sources.append(source)


def is_float_tensor(x: Any) -> bool:
    """Tells whether something is a tensor of floats."""
    return keras.ops.is_tensor(x) and keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _scores(layer: keras.Operation, query: Any, key: Any, *rest: Any) -> Any:
    equation, factor = getattr(layer, "_dot_product_equation", None), getattr(layer, "_inverse_sqrt_key_dim", None)
    if equation is None or factor is None:
        return None
    # As the slow path of Keras's attention layers does, which scales the query first.
    return ops.einsum(equation, key, ops.multiply(query, ops.cast(factor, query.dtype)))


def layers_and_operations(model: keras.Model) -> dict[str, Any]:
    """Layers and operations of graphs below a model, by path."""
    operations = {operation.name: operation for operation in Walk(model).operations}
    return {**operations, **layers_by_path(model)}


class ObservedStep:
    """A training step of a model that changes no variable.

    Args:
        finish: `finish(record, loss, tensors, tapped, gradients) -> structure of tensors`, called while the step is
            traced: what to return of it. `tensors` are those of the record, `tapped` their gradients (None where
            there is none), `gradients` those of `model.trainable_variables`.
        tap_inputs: whether each layer's input has a gradient of its own, apart from what else reads the same tensor.

    Attributes:
        record: the calls of the last step, without its tensors.
    """

    def __init__(self, model: keras.Model, finish: Callable[..., Any], *, tap_inputs: bool = False) -> None:
        self.model, self._finish, self._tap_inputs = model, finish, tap_inputs
        self.record = Record()
        self._records: list[Record] = []
        self._step = engine.observed_step(model, self._forward, self._end)

    def __call__(self, batch: tuple, scale: float = 1.0) -> Any:
        """Runs the step; returns what finish did, as numpy arrays.

        Raises:
            ValueError: the batch does not fit the model or its loss, or Keras itself fails in the model's precision.
        """
        try:
            place, result = self._step((given_of(batch), np.float32(scale)))
        except engine.STEP_ERRORS as error:
            raise explained(self.model, batch, error) from error
        self.record = self._records[int(place)]
        return keras.tree.map_structure(np.asarray, result)

    def operation(self, batch: tuple, scale: float, place: int) -> tuple[str, list[Frame]] | None:
        """Finds what made one of `Record.tensors`, as the backend's `nonfinite_operation`."""
        given, record = (given_of(batch), np.float32(scale)), self.record
        try:
            return engine.nonfinite_operation(self.model, self._forward, given, place + 1)
        finally:
            self.record = record  # and not this trace's, whose tensors are live

    def _forward(self, tap: Tap, batch: Any) -> tuple[Any, list[Any]]:
        given, scale = batch
        recorder = _Recorder(tap, self._tap_inputs)
        methods = ("call", "quantized_call", "activation", "_compute_attention")
        with wrapped_methods(layers_and_operations(self.model).items(), methods, recorder.wrap):
            loss = loss_of(self.model, given)
        self.record = recorder.record
        return loss * scale, [loss, *self.record.tensors]

    def _end(self, loss: Any, kept: list[Any], gradients: list[Any], tapped: list[Any]) -> Any:
        own, *tensors = kept
        gradients_of = [None if place is None else tapped[place] for place in self.record.taps]
        record, self.record.tensors = self.record, []
        # A record belongs to its trace, and batches decide which trace runs: the step itself tells.
        self._records.append(record)
        place = ops.convert_to_tensor(len(self._records) - 1, "int32")
        return place, self._finish(record, own, tensors, gradients_of, gradients)
