"""A compiled model whose optimizer stores its slots in 8 or 16 bits."""

from __future__ import annotations

import keras

from keras_mp.loss_scaling.compiled_optimizer import check_untrained, compiled_optimizer
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.state_formats import check_state_dtype
from keras_mp.loss_scaling.wrap_optimizer import wrap_optimizer
from keras_mp.rebuild.compiled import compile_again
from keras_mp.rebuild.fresh_optimizer import fresh_optimizer


def set_state_dtype(model: keras.Model, state_dtype: str) -> keras.Model:
    """Compiles a model again, with an optimizer that stores its slots, such as Adam's moments, in `state_dtype`.

    Args:
        model: built and compiled; its compile arguments are kept, its metrics and its optimizer start anew. An
            optimizer that is no `LossScaleOptimizer` is wrapped by `wrap_optimizer`. Keras's own `LossScaleOptimizer`
            is exchanged for this package's, with the same first scale and growth interval.
        state_dtype: "float32", "bfloat16" or "float8", as `LossScaleOptimizer` says.

    Returns:
        The same model.

    Raises:
        ValueError: If state_dtype is unknown, or the model is not compiled with an optimizer, or was trained.
        TypeError: If the model has a compile() of its own that keeps not every argument: give its optimizer the
            `state_dtype` there.
    """
    check_state_dtype(state_dtype)
    optimizer = compiled_optimizer(model)
    if state_dtype != getattr(optimizer, "state_dtype", "float32"):
        check_untrained(model, "set_state_dtype", "give LossScaleOptimizer the state_dtype when you compile")
        compile_again(model, _storing_in(optimizer, state_dtype, model))
    return model


def _storing_in(
    optimizer: keras.optimizers.Optimizer, state_dtype: str, model: keras.Model
) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, LossScaleOptimizer):
        return fresh_optimizer(optimizer, state_dtype=state_dtype)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaleOptimizer(
            fresh_optimizer(optimizer.inner_optimizer),
            initial_scale=optimizer.initial_scale,
            growth_interval=optimizer.dynamic_growth_steps,
            state_dtype=state_dtype,
        )
    return wrap_optimizer(fresh_optimizer(optimizer), model, state_dtype=state_dtype)
