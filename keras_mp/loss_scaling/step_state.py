"""The variables that the forward pass of a training step may change."""

from __future__ import annotations

import functools
import types
from typing import Any

import keras

from keras_mp import backend

# Not followed: what an optimizer holds is its own to give back, and the rest holds no variables.
_LEFT_OUT = (keras.optimizers.Optimizer, keras.KerasTensor, type, types.ModuleType)
_PLAIN = {type(None), str, bytes, int, float, bool, complex}
_LIBRARIES = ("keras.", "keras_mp.", "tensorflow.", "jax", "numpy.", "builtins", "threading", "weakref", "_thread")
# Of Keras's objects those that hold what users write.
_HOLDERS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)


def changed_by_the_forward_pass(model: keras.Model) -> list[Any]:
    """Lists the variables other than weights that a step's forward pass may change, each once.

    Those that Keras lists: of layers those that are not trained, and those of metrics; and those that no list of the
    model has: of loss objects and functions, of regularizers, of metrics that are compiled and not built yet, and of
    objects and functions that any of these, or a layer, keeps as an attribute. Not the states of random seeds: a step
    that is tried again must not draw the numbers that made it overflow.

    Args:
        model: a compiled model.

    Returns:
        Keras variables; on TensorFlow also stand-ins for its own, with the same `value` and `assign`.
    """
    known = [*model.non_trainable_variables, *model.metrics_variables]
    distinct = {id(variable): variable for variable in [*known, *_held_by(model)]}
    return [variable for variable in distinct.values() if getattr(variable, "name", "") != "seed_generator_state"]


def _held_by(model: keras.Model) -> list[Any]:
    """What is a variable, and no layer's weight, of all that a model's attributes lead to."""
    held: dict[int, Any] = {}
    weights = {id(variable) for variable in model.trainable_variables}
    seen: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        thing = waiting.pop()
        if type(thing) in _PLAIN or id(thing) in seen or isinstance(thing, _LEFT_OUT):
            continue
        seen[id(thing)] = thing  # kept, as another could have its id otherwise
        if backend.is_variable(thing):
            held[id(thing)] = backend.as_keras_variable(thing)
            continue
        if isinstance(thing, keras.layers.Layer):
            weights |= {id(variable) for variable in thing._trainable_variables}  # of a teacher that a loss calls, too
        waiting += _parts(thing)
    return [variable for key, variable in held.items() if key not in weights and variable is not None]


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return _parts_of_function(thing)
    if isinstance(thing, _HOLDERS) or not type(thing).__module__.startswith(_LIBRARIES):
        return list(getattr(thing, "__dict__", {}).values())
    return []


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    closed_over = [cell.cell_contents for cell in function.__closure__ or () if _is_bound(cell)]
    if (function.__module__ or "").startswith(_LIBRARIES):
        return closed_over
    return [*closed_over, *(function.__globals__.get(name) for name in function.__code__.co_names)]


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
