"""Another optimizer for a compiled model: one that accumulates gradients, or stores its slots in 8 or 16 bits."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.wrapping import wrap_optimizer
from keras_mp.rebuild.optimizers import compile_again, fresh_optimizer
from keras_mp.system.argument_checks import whole_number

_STEPS = "gradient_accumulation_steps"


def change_optimizer(
    model: keras.Model,
    *,
    accumulate: int = 1,
    state_dtype: str | None = None,
    state_memory: str | None = None,
    release_gradients: bool | None = None,
) -> keras.Model:
    """Compiles a model with other settings of its optimizer.

    A setting that is not given stays.

        keras_mp.loss_scaling.change_optimizer(model, accumulate=4)
        model.fit(x, y, batch_size=2)  # the updates of batch_size=8, without

    With `accumulate`, the same batch in N calls with an Nth of the rows each makes the same update, in less memory,
    where the loss divides by the number of rows or targets, all of which count alike. The gradients that are added up
    take as much memory as the weights that train. Layers that compute statistics of a batch, such as
    BatchNormalization, see the micro-batch. A loss that divides by what counts (masks, `ignore_class`,
    `reduction="mean_with_sample_weight"`) becomes the mean of the micro-batches' means, as in Keras: another update
    where they differ in what counts. `reduction="sum"` over a constant, in a loss of your own, is the same.

    Args:
        model: a built and compiled model; its compile arguments are kept, its metrics and its optimizer start anew. An
            optimizer that is no `LossScaleOptimizer` is given to `wrap_optimizer`, and Keras's own `LossScaleOptimizer`
            is exchanged for this package's, with the same first scale and growth interval.
        accumulate: the number of micro-batches of an update; an optimizer that accumulates already takes as many times
            more.
        state_dtype: the dtype that slots, such as Adam's moments, are stored in: "float32", "bfloat16" or "float8", as
            `LossScaleOptimizer` says.
        state_memory: the place of the slots, "device" or, with release_gradients, "host", as `LossScaleOptimizer` says.
        release_gradients: Whether each weight is updated as soon as its own gradient is there, as
            `LossScaleOptimizer` says.

    Returns:
        The same model.

    Raises:
        ValueError: If a setting is unknown or cannot be had, with the reason; if the model is not compiled with an
            optimizer, or was trained.
        TypeError: If the model has a compile() of its own that keeps not every argument: give its optimizer the
            settings there.

    Examples:
        >>> import keras, keras_mp
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("adam", "mse")
        >>> keras_mp.loss_scaling.change_optimizer(model, state_dtype="float8").optimizer.state_dtype
        'float8'
        >>> model = keras_mp.loss_scaling.change_optimizer(model, accumulate=4)
        >>> model.optimizer.state_dtype, model.optimizer.inner_optimizer.gradient_accumulation_steps
        ('float8', 4)
    """
    whole_number("accumulate", accumulate)
    optimizer = compiled_optimizer(model)
    present = {"state_dtype": "float32", "state_memory": "device", "release_gradients": False}
    if isinstance(optimizer, LossScaleOptimizer):
        present = {name: getattr(optimizer, name) for name in present}
    given = {"state_dtype": state_dtype, "state_memory": state_memory, "release_gradients": release_gradients}
    asked: dict[str, Any] = present | {name: value for name, value in given.items() if value is not None}
    new = optimizer if accumulate == 1 else _accumulating(optimizer, accumulate)
    if asked != present or (accumulate > 1 and not isinstance(optimizer, LossScaleOptimizer)):
        new = _ours(new, asked, model)
    if new is not optimizer:
        check_untrained(model, "change_optimizer", "give the settings to LossScaleOptimizer when you compile")
        compile_again(model, new)
    return model


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer scales the loss, Keras's or ours."""
    if isinstance(optimizer, LossScaleOptimizer):
        return not isinstance(optimizer.loss_scale, NoLossScale)
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _accumulating(optimizer: keras.optimizers.Optimizer, steps: int) -> keras.optimizers.Optimizer:
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        return fresh_optimizer(optimizer, **{_STEPS: steps * (getattr(optimizer, _STEPS, None) or 1)})
    return fresh_optimizer(optimizer, inner_optimizer=keras.saving.serialize_keras_object(_accumulating(inner, steps)))


def _ours(
    optimizer: keras.optimizers.Optimizer, settings: dict[str, Any], model: keras.Model
) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, LossScaleOptimizer):
        return fresh_optimizer(optimizer, **settings)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaleOptimizer(
            fresh_optimizer(optimizer.inner_optimizer),
            initial_scale=optimizer.initial_scale,
            growth_interval=optimizer.dynamic_growth_steps,
            **settings,
        )
    return wrap_optimizer(fresh_optimizer(optimizer), model, **settings)


# The optimizer of a compiled model, and whether another may take its place.


def compiled_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a model.

    Raises:
        ValueError: If the model is not compiled with an optimizer.
    """
    optimizer = getattr(model, "optimizer", None)
    if not getattr(model, "compiled", False) or optimizer is None:
        raise ValueError(f"model {model.name!r} is not compiled with an optimizer: call compile() first")
    return optimizer


def check_untrained(model: keras.Model, function: str, instead: str) -> None:
    """Checks that a compiled model's optimizer has made no update.

    Raises:
        ValueError: If it has made one: `function` would exchange it, and `instead` is what else to do.
    """
    optimizer = compiled_optimizer(model)
    iterations = getattr(optimizer, "_iterations", None)  # `iterations` divides it by the steps of an accumulation
    if not optimizer.built or iterations is None or getattr(iterations, "_value", 0) is None:
        return
    if updates := int(keras.ops.convert_to_numpy(iterations)):
        raise ValueError(
            f"model {model.name!r} was trained for {updates} steps, and its optimizer would start anew: call "
            f"{function} before fit, or {instead}"
        )
