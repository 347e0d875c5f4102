"""The way back from `stabilize`, `convert` and `make_lean`."""

from __future__ import annotations

import keras

from keras_mp.lean.lean_model import LEAN
from keras_mp.lean.training_step import STEP_ON_A_CPU
from keras_mp.loss_scaling.loss_scale import LossScale, NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.undone_step import ATOMIC
from keras_mp.qat.litert_ranges import LITERT
from keras_mp.rebuild.optimizers import (
    carry_slots,
    exchange_optimizer,
    fresh_optimizer,
    leaves,
    optimizers_of,
    unwrapped,
)
from keras_mp.rebuild.walk import FLOAT8, QAT, check_is_model
from keras_mp.stability.stabilized import STABILIZED
from keras_mp.system.argument_checks import one_of
from keras_mp.treatment.change import check_built, undo
from keras_mp.treatment.waiting import forget, register_calls, waiting, waits

_CHANGES = {"stabilize": STABILIZED, "convert": (FLOAT8, QAT, LITERT), "make_lean": LEAN}


def revert(model: keras.Model, *changes: str) -> keras.Model:
    """Undoes the kit's changes to a model, in place.

    They are those of `stabilize`, `convert`, `make_lean` and `prepare`.

        keras_mp.revert(model)  # all of it: the saved model is one of Keras alone
        keras_mp.revert(model, "convert")  # plain products again; what is stable or lean stays so

    The weights are the model's own, with their values. What `narrow_frozen` stored in 16 bits is float32 again, without
    the low bits; weights of the policy "bfloat16" that `stabilize` made float32 are rounded to bfloat16. The amaxes of
    delayed scaling go. A compiled model stays compiled; where weights changed their dtype, or amaxes went, its
    optimizer is a new one with the state of the old. Without names, the step is Keras's own again, and in place of a
    `keras_mp.LossScaleOptimizer` comes the optimizer within, in Keras's LossScaleOptimizer where the loss was scaled;
    slots of 8 or 16 bits are float32.

    Args:
        model: a built Keras model, or one whose changes wait for its first batch.
        changes: the names of the changes to undo, "stabilize", "convert" and "make_lean" (with `narrow_frozen` and
            recomputed blocks); by default all, and what `prepare` did.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built and nothing waits for it, or a name is none of the three.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32), keras.layers.Dense(4, "softmax")])
        >>> model = keras_mp.convert(keras_mp.stabilize(model), select=lambda path, layer: True)
        >>> print(keras_mp.report(keras_mp.revert(model, "convert")))
        sequential...: 1 of 1 layers that need float32 have it; 0 of 2 products...
    """
    for name in changes:
        one_of("changes", name, _CHANGES)
    check_is_model(model)
    if changes and waiting(model) and waits(model, "revert", changes=list(changes)):
        return model
    if waiting(model):
        forget(model)
    else:
        check_built(model)
    wanted = changes or tuple(_CHANGES)
    names = [treatment for change in wanted for treatment in _CHANGES[change]]
    if not changes:
        names += [ATOMIC, STEP_ON_A_CPU]
    undo(model, names)
    for name, optimizer in optimizers_of(model).items() if not changes else ():
        for leaf in leaves(unwrapped(optimizer)):
            vars(leaf).pop("_backend_apply_gradients", None)
        if isinstance(optimizer, LossScaleOptimizer):
            _exchange(model, name, optimizer)
    return model


register_calls({"revert": lambda model, changes: revert(model, *changes)})


def _exchange(model: keras.Model, name: str, optimizer: LossScaleOptimizer) -> None:
    """Puts Keras's own optimizer in place of the kit's."""
    scales = not isinstance(optimizer.loss_scale, NoLossScale)
    plain = fresh_optimizer(optimizer.inner_optimizer)
    new, lost = plain, []
    if scales:
        steps = optimizer.dynamic_growth_steps or LossScale().growth_interval
        new = keras.optimizers.LossScaleOptimizer(plain, optimizer.initial_scale, steps, name=optimizer.name)
    if optimizer.built:
        weights = list(optimizer._trainable_variables)  # private: an optimizer has no public list of what it trains
        new.build(weights)
        lost = carry_slots(optimizer.inner_optimizer, plain, {id(weight): weight for weight in weights})
        if scales:
            new.dynamic_scale.assign(optimizer.dynamic_scale)
    exchange_optimizer(model, name, new, lost, stacklevel=4)
    model.train_function = None  # Keras's cached step
