"""Another optimizer for a compiled model: one that accumulates gradients, or stores its slots in 8 or 16 bits."""

from __future__ import annotations

import dataclasses

import keras

from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.state_slot import check_state_dtype, check_state_memory
from keras_mp.loss_scaling.wrap_optimizer import wrap_optimizer
from keras_mp.rebuild.compiled import compile_again
from keras_mp.rebuild.optimizers import fresh_optimizer
from keras_mp.system.whole_number import whole_number

_STEPS = "gradient_accumulation_steps"


def accumulate_gradients(model: keras.Model, steps: int) -> keras.Model:
    """Compiles a model again, with an optimizer that makes one update of `steps` micro-batches.

    The same batch in `steps` calls of `fit` with an Nth of the rows each makes the same update, in less memory:
    `keras_mp.accumulate_gradients(model, 4).fit(x, y, batch_size=2)` for `model.fit(x, y, batch_size=8)`. The gradients
    that are added up take as much memory as the weights that train. Layers that compute statistics of a batch, such as
    BatchNormalization, see the micro-batch, and a loss that is a mean over the targets that count (masks, weights,
    `ignore_class`) is the mean of the micro-batches' means.

    Args:
        model: a compiled model; its compile arguments are kept, its metrics and its optimizer start anew.
        steps: the number of micro-batches of an update; an optimizer that accumulates already takes as many times more.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not compiled with an optimizer, was trained, or steps is not a whole number from 1.
        TypeError: If the model has a compile() of its own: give its optimizer `gradient_accumulation_steps` there.
    """
    whole_number("steps", steps)
    optimizer = compiled_optimizer(model)
    if steps > 1:
        check_untrained(model, "accumulate_gradients", f"give the optimizer {_STEPS}")
        compile_again(model, _accumulating(optimizer, steps))
    return model


def _accumulating(optimizer: keras.optimizers.Optimizer, steps: int) -> keras.optimizers.Optimizer:
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        return fresh_optimizer(optimizer, **{_STEPS: steps * (getattr(optimizer, _STEPS, None) or 1)})
    return fresh_optimizer(optimizer, inner_optimizer=keras.saving.serialize_keras_object(_accumulating(inner, steps)))


def set_state_dtype(
    model: keras.Model, state_dtype: str, *, state_memory: str = "device", release_gradients: bool = False
) -> keras.Model:
    """Compiles a model again, with an optimizer that stores its slots, such as Adam's moments, in `state_dtype`.

    Args:
        model: a built and compiled model; its compile arguments are kept, its metrics and its optimizer start anew. An
            optimizer that is no `LossScaleOptimizer` is wrapped by `wrap_optimizer`. Keras's own `LossScaleOptimizer`
            is exchanged for this package's, with the same first scale and growth interval.
        state_dtype: the dtype that slots are stored in: "float32", "bfloat16" or "float8", as `LossScaleOptimizer`
            says.
        state_memory: the place of the slots, "device" or, with release_gradients, "host", as `LossScaleOptimizer` says.
        release_gradients: Whether each weight is updated as soon as its own gradient is there, as `NoLossScale` says.

    Returns:
        The same model.

    Raises:
        ValueError: If a setting is unknown or cannot be had, with the reason; if the model is not compiled with an
            optimizer, or was trained.
        TypeError: If the model has a compile() of its own that keeps not every argument: give its optimizer the
            `state_dtype` there.
    """
    check_state_dtype(state_dtype)
    check_state_memory(state_memory, release_gradients)
    optimizer = compiled_optimizer(model)
    asked = (state_dtype, state_memory, release_gradients)
    present = ("float32", "device", False)
    if isinstance(optimizer, LossScaleOptimizer):
        present = (optimizer.state_dtype, optimizer.state_memory, optimizer.loss_scale.release_gradients)
    if asked != present:
        check_untrained(model, "set_state_dtype", "give LossScaleOptimizer the state_dtype when you compile")
        compile_again(model, _storing_in(optimizer, *asked, model))
    return model


def _storing_in(
    optimizer: keras.optimizers.Optimizer,
    state_dtype: str,
    state_memory: str,
    release_gradients: bool,
    model: keras.Model,
) -> keras.optimizers.Optimizer:
    settings = {"state_dtype": state_dtype, "state_memory": state_memory}
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if release_gradients and scales and not isinstance(getattr(optimizer, "loss_scale", None), NoLossScale):
        raise ValueError(
            f"release_gradients=True, and optimizer {optimizer.name!r} scales the loss, so that an overflow in one "
            "gradient must skip the step of all: compile with an optimizer that does not"
        )
    if isinstance(optimizer, LossScaleOptimizer):
        if isinstance(optimizer.loss_scale, NoLossScale):
            scale = dataclasses.replace(optimizer.loss_scale, release_gradients=release_gradients)
            settings["loss_scale"] = keras.saving.serialize_keras_object(scale)
        return fresh_optimizer(optimizer, **settings)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaleOptimizer(
            fresh_optimizer(optimizer.inner_optimizer),
            initial_scale=optimizer.initial_scale,
            growth_interval=optimizer.dynamic_growth_steps,
            state_dtype=state_dtype,
        )
    return wrap_optimizer(fresh_optimizer(optimizer), model, release_gradients=release_gradients, **settings)


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
    """Checks that the optimizer of a compiled model has made no update, which a new one would forget.

    Args:
        function: the name of the function that is to exchange its optimizer, for the message.
        instead: the other thing to do, for the message.

    Raises:
        ValueError: If it has made one.
    """
    updates = _updates(compiled_optimizer(model))
    if updates:
        raise ValueError(
            f"model {model.name!r} was trained for {updates} steps, and its optimizer would start anew: call "
            f"{function} before fit, or {instead}"
        )


def _updates(optimizer: keras.optimizers.Optimizer) -> int:
    iterations = getattr(optimizer, "_iterations", None)  # `iterations` divides it by the steps of an accumulation
    if not optimizer.built or iterations is None or getattr(iterations, "_value", 0) is None:
        return 0
    return int(keras.ops.convert_to_numpy(iterations))
