"""The update of one weight: slots in fewer bits and a bfloat16 weight are float32 in it, and rounded once."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mp.loss_scaling.state_creation import slots_of
from keras_mp.loss_scaling.state_slot import StateSlot, updating
from keras_mp.loss_scaling.wide_weight import WideWeight, is_narrow


class Rounding(NamedTuple):
    """Of an update: the seed, how bfloat16 weights are rounded, and the number of the optimizer's first weight."""

    seed: int
    weights: str
    first: int


def update_step(
    leaf: keras.optimizers.Optimizer, how: Rounding, gradient: Any, variable: Any, learning_rate: Any
) -> None:
    """What takes the place of an optimizer's own `update_step`.

    Args:
        leaf: the optimizer.
        how: is rounded.
        gradient, variable, learning_rate: as Keras passes them.
    """
    slots: list[StateSlot] = [*slots_of(leaf, variable)]
    if not is_narrow(variable):
        with updating(slots, how.seed, leaf._iterations):
            type(leaf).update_step(leaf, gradient, variable, learning_rate)
        return
    place = leaf._get_variable_index(variable)
    weight = WideWeight(leaf._trainable_variables[place], variable, how.first + place, how.weights)
    with updating([*slots, weight], how.seed, leaf._iterations):
        _decay(leaf, weight)
        type(leaf).update_step(leaf, gradient, weight, learning_rate)
        if weight.constraint is not None:
            weight.assign(weight.constraint(weight.value))


def _decay(leaf: keras.optimizers.Optimizer, weight: WideWeight) -> None:
    """Decays one weight: as Keras does, which on TensorFlow does so outside of an update only."""
    if type(leaf)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay:
        type(leaf)._apply_weight_decay(leaf, [weight])
    elif leaf.weight_decay is not None and leaf._use_weight_decay(weight):
        rate = ops.cast(leaf.learning_rate, "float32")
        weight.assign(weight - weight * leaf.weight_decay * rate)


def key_of(leaf: keras.optimizers.Optimizer, variable: Any) -> Any:
    """What takes the place of an optimizer's own `_var_key`, by which it finds the slots of a weight."""
    return type(leaf)._var_key(leaf, variable.values if isinstance(variable, WideWeight) else variable)
