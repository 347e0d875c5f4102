"""A skipped step changes nothing: not the weights, and not BatchNorm's statistics or the metrics either."""

from __future__ import annotations

import functools
import types
import warnings
from contextvars import ContextVar
from functools import partial
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.rebuild.optimizers import fresh_optimizer, held_optimizers, without_default
from keras_mp.treatment.change import change
from keras_mp.treatment.treated import Treatment, register_treatments

engine = backend.engine_of(__package__)

ATOMIC = "atomic step"
_IN_STEP: ContextVar[bool] = ContextVar("in_atomic_step", default=False)


def atomic_skip(model: keras.Model) -> keras.Model:
    """Makes each step of a compiled model atomic, in place.

    A skipped step changes nothing. Where the gradients of a step are not finite, its optimizer leaves weights and slots
    as they were; this puts back what the forward pass had changed by then: moving statistics and metrics. The loss
    scale and its counters move, and random seeds advance. It holds for `fit`, `train_on_batch`, and whatever else calls
    `model.train_step`; recompiling the model keeps it, and so does saving and loading.

    A model with several optimizers, as a GAN has, keeps a step only if none of them skipped: else all weights and slots
    go back, too, for which a step holds a copy of them. On JAX, `fit` carries the variables of `model.optimizer` alone.

    Metrics count the steps that were made. Until an epoch has one, the logs of a step show that step's own loss and
    metrics. The logs of an epoch whose steps were all skipped are NaN, with a warning: a mean over nothing would be 0,
    the best loss that there is.

    Args:
        model: a Keras model, compiled with a `keras_mp.LossScaleOptimizer`; of several optimizers one is enough.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not compiled, or no optimizer of it checks its gradients; also in a later step, if
            it was recompiled with such optimizers.
    """
    _checking_optimizers(model)
    change(model, [(model, {ATOMIC: None})])
    return model


class AtomicStep:
    """A model each of whose steps changes everything or nothing."""

    def train_step(self: Any, *arguments: Any) -> Any:
        optimizers = _checking_optimizers(self)
        variables = changed_by_the_forward_pass(self)
        if len(_optimizers(self)) > 1:
            # Weights and slots, but not the state of scales.
            variables += [
                *self.trainable_variables,
                *(slot for held in _optimizers(self).values() for slot in _slots(held)),
            ]
        skips = [optimizer.skipped_steps for optimizer in optimizers]
        # Those that are built in this very step: their slots are not among the variables yet.
        unbuilt = [optimizer for optimizer in _optimizers(self).values() if not optimizer.built]
        logs_of = partial(_counted_results, self, optimizers[0].since_reset, unbuilt)
        before = _IN_STEP.set(True)
        try:
            with backend.lookups_wait():
                step = super().train_step  # type: ignore[misc]
                return engine.atomic_step(self, step, skips, variables, logs_of, arguments)
        finally:
            _IN_STEP.reset(before)

    def reset_metrics(self: Any) -> None:
        super().reset_metrics()  # type: ignore[misc]
        for optimizer in _optimizers(self).values():
            if isinstance(optimizer, LossScaleOptimizer):
                optimizer.since_reset.assign(0)

    def get_metrics_result(self: Any) -> dict[str, Any]:
        results: dict[str, Any] = super().get_metrics_result()  # type: ignore[misc]
        return results if _IN_STEP.get() else _results_or_nan(self, results)


register_treatments({ATOMIC: Treatment(lambda original, names: AtomicStep, order=-3)})


def _counted_results(
    model: keras.Model, since_reset: Any, unbuilt: list[Any], own: dict[str, Any], skipped: Any
) -> dict[str, Any]:
    """Makes the logs of counted steps, or of this one."""
    if backend.is_concrete(skipped) and bool(skipped):  # a traced step is traced again once optimizers are built
        _begin_anew(unbuilt)
    nothing = ops.logical_and(skipped, ops.less(since_reset, 1))
    since_reset.assign(ops.where(nothing, -1, 1))
    # A metric may return its variable, or a number of Python's.
    results = {name: backend.as_tensor(value) for name, value in _metric_results(model).items() if name in own}
    return own | {name: ops.where(nothing, ops.cast(own[name], value.dtype), value) for name, value in results.items()}


def _results_or_nan(model: keras.Model, results: dict[str, Any]) -> dict[str, Any]:
    """Makes an epoch's or an evaluation's metrics, or NaN."""
    optimizers = [optimizer for optimizer in _optimizers(model).values() if isinstance(optimizer, LossScaleOptimizer)]
    values = [backend.as_tensor(optimizer.since_reset) for optimizer in optimizers]
    if not any(backend.is_concrete(value) and int(value) < 0 for value in values):
        return results
    warnings.warn(
        "all steps were skipped, because their gradients were not finite: there is no loss to report, and metrics are "
        "NaN. keras_mp.PrecisionMonitor() shows the loss scale, and keras_mp.NonFiniteFinder() the layer",
        stacklevel=3,
    )

    def is_float(value: Any) -> bool:
        # A metric may return a number of Python's.
        return keras.backend.is_float_dtype(keras.backend.standardize_dtype(backend.as_tensor(value).dtype))

    return {name: ops.full_like(value, float("nan")) if is_float(value) else value for name, value in results.items()}


def _metric_results(model: keras.Model) -> dict[str, Any]:
    results: dict[str, Any] = {}
    # Not model.get_metrics_result(), which fails on the compiled metrics that a custom step does not use.
    for metric in model.metrics:
        if getattr(metric, "built", True):
            result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
    return results


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Finds the optimizers that a step changes, by name."""
    if keras.backend.backend() == "jax":  # where Keras gives a step the variables of this one
        optimizer = getattr(model, "optimizer", None)
        return {} if optimizer is None else {"optimizer": optimizer}
    return held_optimizers(model)


def _checking_optimizers(model: keras.Model) -> list[LossScaleOptimizer]:
    """Finds the optimizers that check gradients, at least one."""
    optimizers = _optimizers(model)
    if not optimizers:
        raise ValueError(
            f"model {model.name!r} is not compiled with an optimizer yet: call compile(), then atomic_skip()"
        )
    checking = [optimizer for optimizer in optimizers.values() if isinstance(optimizer, LossScaleOptimizer)]
    if checking:
        return checking
    names = [f"{name} ({type(held).__name__})" for name, held in without_default(optimizers).items()]
    raise ValueError(
        f"of the optimizers of model {model.name!r}, {' and '.join(names)}, none says whether it skipped a step: "
        "compile with keras_mp.LossScaleOptimizer(optimizer), or with loss_scale=keras_mp.LossScale.none() for "
        "bfloat16 and float32"
    )


def _slots(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    moving = {id(variable) for variable in optimizer.state} if isinstance(optimizer, LossScaleOptimizer) else set()
    return [variable for variable in optimizer.variables if id(variable) not in moving]


def _begin_anew(optimizers: list[keras.optimizers.Optimizer]) -> None:
    """Gives optimizers the slots that they were built with."""
    for optimizer in optimizers:
        if optimizer.built:
            fresh = fresh_optimizer(optimizer)
            fresh.build(optimizer._trainable_variables)
            for slot, first in zip(_slots(optimizer), _slots(fresh), strict=True):
                slot.assign(first)


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
    """Lists other variables that a step's forward pass may change.

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
    """Lists variables that a model's attributes lead to, without weights."""
    held: dict[int, Any] = {}
    weights = {id(variable) for variable in model.trainable_variables}
    seen: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        thing = waiting.pop()
        if type(thing) in _PLAIN or id(thing) in seen or isinstance(thing, _LEFT_OUT):
            continue
        seen[id(thing)] = thing  # kept, as another could have its id otherwise
        if engine.is_variable(thing):
            held[id(thing)] = engine.as_keras_variable(thing)
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
