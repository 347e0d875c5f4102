"""Calls that wait until a model has its weights: they are kept with it, saved, and made when it is built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import compute_output_spec, get_stateless_scope, in_stateless_scope
from keras_mp.rebuild.walk import Walk, check_is_model, children_of, has_no_call, is_built, treatments_of
from keras_mp.treatment.treated import Treatment, register_treatments, treat, untreat

WAITING = "waiting"
# The functions that are called, by the name under which a saved model has them.
_CALLS: dict[str, Callable[..., Any]] = {}


def register_calls(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Makes functions known that can wait for a built model."""
    _CALLS.update(calls)


def call(model: keras.Model, name: str, **arguments: Any) -> None:
    """Makes a registered call, of a room not imported here."""
    _CALLS[name](model, **arguments)


def waits(model: keras.Model, name: str, **arguments: Any) -> bool:
    """Lets a call wait where a model is not built.

    Keras builds it from the first batch.

    Args:
        name: the name that the function is registered under.
        arguments: the other arguments of the call, which Keras serializes where the model is saved.

    Returns:
        Whether the call waits; where it does not, it is to be made now.

    Raises:
        TypeError: the model is no Keras model.
        ValueError: no batch will build the model, as it has no `call()`.
    """
    check_is_model(model)
    calls = treatments_of(model).get(WAITING)
    if calls is None and _has_weights(model):
        return False
    if has_no_call(model):
        raise ValueError(f"model {model.name!r} has no call(), so no batch builds it: build the models in it first")
    if calls is None:
        treat(model, {WAITING: [[name, arguments]]})
    else:
        calls.append([name, arguments])
    print(f"{name} waits: model {model.name!r} is not built yet. fit builds it from its first batch")
    return True


def waiting(model: keras.Layer) -> list[str]:
    """The names of the calls that wait for a model."""
    return [name for name, _ in treatments_of(model).get(WAITING, ())]


def forget(model: keras.Model) -> None:
    """Drops the calls that wait."""
    untreat(model, (WAITING,))


def _has_weights(model: keras.Layer) -> bool:
    """Whether a model is built with what is in it: `build(shape)` of a class without its own builds no layer."""
    parts = children_of(model)
    return is_built(model) and (all(part.built for part in parts) or any(part.variables for part in parts))


def _make_calls(model: Any) -> None:
    """Makes the calls that wait for a model and, before them, those that wait for models in it."""
    for layer in reversed(Walk(model).every):
        calls = treatments_of(layer).get(WAITING, ())
        forget(layer)
        for name, arguments in calls:
            call(layer, name, **arguments)


def is_traced() -> bool:
    """Whether this runs in a program, where variables cannot change."""
    return in_stateless_scope() or not backend.is_concrete(keras.ops.zeros(()))


def _has_value(variable: Any) -> bool:
    """Whether a variable has a value, of its own or in a step of JAX; while a model is built it has none."""
    scope = get_stateless_scope()
    # Private: its public value would be made by its initializer.
    return variable._value is not None or (scope is not None and scope.get_current_value(variable) is not None)


def _once_built(model: Any) -> None:
    if _has_weights(model) and not is_traced():
        _make_calls(model)


def _build(model: Any, data: Any) -> None:
    """Builds a model for a batch, or for what describes one, as Keras does; then makes the calls that wait."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    dtype_of = keras.backend.standardize_dtype
    shapes = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, dtype_of(leaf.dtype)), x
    )
    _build_by(model, model, shapes, training=False)


def _build_by(model: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if not all(layer.built for layer in Walk(model).every):
        try:
            compute_output_spec(call, *args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"model {model.name!r} waits for its first batch, for {' and '.join(waiting(model))}, and its call() "
                f"fails on shapes alone: {error}. Build it by a call on a batch before"
            ) from error
    _make_calls(model)


class WaitsForBatch:
    """A model that is not built, for which calls wait."""

    def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        # With this Keras builds a model before it traces its step.
        if data_batch is None:
            _, _, read = next(iter(iterator))
            data_batch = read[0] if isinstance(read, (list, tuple)) else next(read)
        _build(self, data_batch)
        self._symbolic_build(data_batch=data_batch)

    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        # TensorFlow alone asks for this. Without a strategy Keras does nothing here: it builds a model as it traces.
        if self._distribute_strategy is None:
            # Private: an iterator does not show its data set, of which nothing is read for its shapes.
            _build(self, iterator._get_iterator().element_spec if data_batch is None else data_batch)
        else:
            super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def make_predict_function(self: Any, force: bool = False) -> Any:
        if _has_weights(self):  # JAX has built it by now
            _make_calls(self)
            return self.make_predict_function(force)

        def first(batches: Any) -> Any:
            # With a strategy a batch is in parts, one for each replica.
            parts_of = self.distribute_strategy.experimental_local_results
            _build(self, keras.tree.map_structure(lambda leaf: parts_of(leaf)[0], batches[0]))
            self.make_predict_function()
            return self.predict_function(batches)

        self.predict_function = first
        return first

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_weights = _has_weights(self)
        if not is_traced() or (has_weights and not self.variables):
            _build_by(self, super().call, *args, **kwargs)  # type: ignore[misc]
            return self.call(*args, **kwargs)
        if has_weights and all(map(_has_value, self.variables)):
            raise ValueError(
                f"model {self.name!r} waits for its first batch, for {' and '.join(waiting(self))}, and is called in a "
                "program that is being traced: call it once on a batch before"
            )
        return super().call(*args, **kwargs)  # type: ignore[misc]

    @property
    def layers(self: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_clone_sequential_model":
            raise ValueError(
                f"keras.models.clone_model makes a plain Sequential of {self.name!r}, for which nothing waits: use "
                "type(model).from_config(model.get_config()), or build the model before"
            )
        return super().layers  # type: ignore[misc]


def _written(calls: Any) -> Any:
    return [[name, keras.saving.serialize_keras_object(arguments)] for name, arguments in calls]


def _read(calls: Any) -> Any:
    return [[name, keras.saving.deserialize_keras_object(arguments)] for name, arguments in calls]


register_treatments(
    {WAITING: Treatment(lambda original, names: WaitsForBatch, built=_once_built, order=-9, write=_written, read=_read)}
)
