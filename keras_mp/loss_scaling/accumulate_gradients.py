"""A compiled model whose optimizer adds up the gradients of several micro-batches before each update."""

from __future__ import annotations

import keras

from keras_mp.loss_scaling.compiled_optimizer import check_untrained, compiled_optimizer
from keras_mp.rebuild.compiled import compile_again
from keras_mp.rebuild.fresh_optimizer import fresh_optimizer
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
        model: compiled; its compile arguments are kept, its metrics and its optimizer start anew.
        steps: how many micro-batches; an optimizer that accumulates already takes as many times more.

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
