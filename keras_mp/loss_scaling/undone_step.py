"""A skipped step changes nothing: not the weights, and not BatchNorm's statistics or the metrics either."""

from __future__ import annotations

import functools
import types
import warnings
from functools import partial
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.treatment.change import change
from keras_mp.treatment.treated import Treatment, register_treatments

ATOMIC = "atomic step"


def atomic_skip(model: keras.Model) -> keras.Model:
    """Makes each step of a compiled model atomic: a skipped step changes nothing. Changes the model in place.

    Where the gradients of a step are not finite, its optimizer leaves weights and slots as they were; this puts back
    what the forward pass had changed by then: moving statistics and metrics. The loss scale and its counters move, and
    random seeds advance. It holds for `fit`, `train_on_batch`, and whatever else calls `model.train_step`; recompiling
    the model keeps it, and so does saving and loading.

    Metrics count the steps that were made. Until an epoch has one, the logs of a step show that step's own loss and
    metrics. The logs of an epoch without one are NaN, with a warning: a mean over nothing would be 0, the best loss
    that there is.

    Args:
        model: a Keras model, compiled with a `keras_mp.LossScaleOptimizer`.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not compiled, or its optimizer does not check its gradients; also in a later step,
            if it was recompiled with such an optimizer.
    """
    _optimizer_of(model)
    change(model, [(model, {ATOMIC: None})])
    return model


class AtomicStep:
    """A model each of whose steps changes everything or nothing."""

    def train_step(self: Any, *arguments: Any) -> Any:
        skips = _optimizer_of(self).consecutive_skips
        variables = changed_by_the_forward_pass(self)
        step = super().train_step  # type: ignore[misc]
        with backend.lookups_wait():
            return backend.atomic_step(self, step, skips, variables, partial(_counted_results, self), arguments)

    def get_metrics_result(self: Any) -> dict[str, Any]:
        return _results_or_nan(self, super().get_metrics_result())  # type: ignore[misc]


register_treatments({ATOMIC: Treatment(lambda original, names: AtomicStep, order=-3)})


def _counted_results(model: keras.Model, own: dict[str, Any]) -> dict[str, Any]:
    """The logs of a step: metrics of the steps that count, or of this one alone while there are none."""
    results = {name: value for name, value in _metric_results(model).items() if name in own}
    nothing = _nothing_counted(model)
    return own | {
        name: ops.where(nothing, ops.cast(own[name], backend.as_tensor(value).dtype), value)
        for name, value in results.items()
    }


def _results_or_nan(model: keras.Model, results: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an epoch, which Keras asks for when it ends."""
    nothing = _nothing_counted(model)
    if backend.is_concrete(nothing) and bool(nothing):
        warnings.warn(
            "no step counts: all were skipped, because their gradients were not finite, so loss and metrics are NaN. "
            "keras_mp.PrecisionMonitor() shows the loss scale, and keras_mp.NonFiniteFinder() the layer",
            stacklevel=2,
        )
    return {
        name: ops.where(nothing, float("nan"), value) if _is_float(value) else value for name, value in results.items()
    }


def _is_float(value: Any) -> bool:
    # A metric may return a number of Python's.
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(backend.as_tensor(value).dtype))


def _nothing_counted(model: keras.Model) -> Any:
    """Whether no step has been counted since the metrics were reset: the weights of all losses sum to 0."""
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is not None and any(metric is tracker for metric in model.metrics):
        return ops.equal(tracker.count, 0)
    # Of a custom step: sums and counts all start at 0.
    variables = model.metrics_variables
    return ops.all(ops.stack([ops.all(ops.equal(v, 0)) for v in variables])) if variables else ops.array(False)


def _metric_results(model: keras.Model) -> dict[str, Any]:
    results: dict[str, Any] = {}
    # Not model.get_metrics_result(), which fails on the compiled metrics that a custom step does not use.
    for metric in model.metrics:
        if getattr(metric, "built", True):
            result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
    return results


def _optimizer_of(model: keras.Model) -> LossScaleOptimizer:
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    if optimizer is None:
        raise ValueError(
            f"model {model.name!r} is not compiled with an optimizer yet: call compile(), then atomic_skip()"
        )
    raise ValueError(
        f"the optimizer of model {model.name!r}, {type(optimizer).__name__}, does not say whether it skipped a step: "
        "compile with keras_mp.LossScaleOptimizer(optimizer), or with loss_scale=keras_mp.LossScale.none() for "
        "bfloat16 and float32"
    )


# The variables that the forward pass of a training step may change.

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
