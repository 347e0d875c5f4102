"""A skipped step changes nothing: not the weights, and not BatchNorm's statistics or the metrics either."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras

from keras_mp import backend
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer


def atomic_skip(model: keras.Model) -> keras.Model:
    """Makes each step of a compiled model atomic: a skipped step changes nothing. Changes the model in place.

    Where the gradients of a step are not finite, its optimizer leaves weights and slots as they were; this puts back
    what the forward pass had changed by then: moving statistics and metrics. The loss scale and its counters move, and
    random seeds advance. It holds for `fit`, `train_on_batch`, and whatever else calls `model.train_step`; recompiling
    the model keeps it.

    Args:
        model: a Keras model, compiled with a `keras_mp.LossScaleOptimizer`.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not compiled, or its optimizer does not check its gradients; also in a later step,
            if it was recompiled with such an optimizer.
    """
    _optimizer_of(model)
    if getattr(model.train_step, "func", None) is _atomic_step:
        return model
    model.train_step = partial(_atomic_step, model, model.train_step)
    model.train_function = None  # Keras's cached step
    return model


def _atomic_step(model: keras.Model, train_step: Any, *arguments: Any) -> Any:
    skips = _optimizer_of(model).consecutive_skips
    variables = _changed_by_the_forward_pass(model)
    return backend.atomic_step(model, train_step, skips, variables, partial(_metric_results, model), arguments)


def _changed_by_the_forward_pass(model: keras.Model) -> list[Any]:
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    # A step that is tried again must not draw the random numbers that made it overflow.
    return list({id(v): v for v in variables if v.name != "seed_generator_state"}.values())


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
        "compile with keras_mp.LossScaleOptimizer(optimizer), or with loss_scale=keras_mp.NoLossScale() for bfloat16 "
        "and float32"
    )
