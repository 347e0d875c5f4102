"""Makes a Keras optimizer clip, decay, update and average once, and nothing else: the rest of a step is done by then.

A Keras optimizer by itself accumulates gradients, and sums them over replicas, after clipping, in branches that a
distribution strategy refuses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.gradients import is_overwritten
from keras_mp.loss_scaling.inner_update import Rounding, key_of, update_step
from keras_mp.loss_scaling.one_program import in_one_program
from keras_mp.loss_scaling.wide_weight import Unconstrained, WideWeight, is_narrow


def check_unscaled(name: str, optimizer: keras.optimizers.Optimizer) -> None:
    """Checks that an argument is an optimizer which does not scale the loss.

    Args:
        name: the argument's name.
        optimizer: its value.

    Raises:
        TypeError: If it is not a Keras optimizer.
        ValueError: If it scales the loss already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{name}={optimizer!r} must be a Keras optimizer, such as keras.optimizers.Adam()")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{name}={optimizer.name!r} is a {type(optimizer).__name__} already, and the loss must be scaled once: use "
            "it as it is, or pass its inner_optimizer"
        )


def leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that hold the settings: the optimizer itself, or those inside Keras's MultiOptimizer."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many micro-batches an optimizer accumulates.

    Args:
        optimizer: a built optimizer.

    Returns:
        Its `gradient_accumulation_steps`, 1 for None.

    Raises:
        ValueError: If several inner optimizers accumulate over different numbers of steps.
    """
    steps = {leaf.gradient_accumulation_steps or 1 for leaf in leaves(optimizer) if leaf.built}
    if len(steps) > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {sorted(steps)} in the optimizers inside {optimizer.name!r}: under one "
            "loss scale it must be the same in all"
        )
    return steps.pop() if steps else 1


def count(optimizer: keras.optimizers.Optimizer) -> None:
    """Adds one to the iterations of an optimizer and of those inside."""
    for counted in {id(counted): counted for counted in (optimizer, *leaves(optimizer))}.values():
        counted._iterations.assign_add(1)


def apply(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[keras.Variable],
    changing: list[Any],
    seed: int = 0,
    weight_rounding: str = "stochastic",
) -> None:
    """Makes the update.

    Args:
        optimizer: the optimizer.
        grads: the mean gradients of the micro-batches, summed over all replicas.
        variables: their variables.
        changing: all variables that a step may change.
        seed: of the stochastic rounding of slots in 8 or 16 bits, and of weights in bfloat16.
        weight_rounding: of weights in bfloat16, "stochastic" or "nearest".
    """
    replacements = {
        "_overwrite_variables_directly_with_gradients": _overwrite_with_gradients,
        "_all_reduce_sum_gradients": lambda grads_and_vars: grads_and_vars,
    }
    # Replicas run in threads that take turns, so the last one out takes the replacements away.
    state = vars(optimizer)
    state["_replicas_applying"] = state.get("_replicas_applying", 0) + 1
    # Numbers of weights, before which those of another leaf end.
    first = 0
    for leaf in leaves(optimizer):
        vars(leaf).update(
            replacements,
            _backend_apply_gradients=partial(_apply_to_leaf, leaf, changing),
            update_step=partial(update_step, leaf, Rounding(seed, weight_rounding, first)),
            _var_key=partial(key_of, leaf),
        )
        first += len(leaf._trainable_variables)
    try:
        optimizer.apply(grads, variables)
    finally:
        state["_replicas_applying"] -= 1
        for leaf in leaves(optimizer) if state["_replicas_applying"] == 0 else []:
            for name in (*replacements, "_backend_apply_gradients", "update_step", "_var_key"):
                del vars(leaf)[name]


def finalize(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    """Sets variables to their moving averages, those of an optimizer that keeps some.

    Args:
        optimizer: the optimizer.
        variables: the model's trainable variables.
    """
    name = "_model_variables_moving_average"
    for leaf in leaves(optimizer):
        if not leaf.use_ema:
            continue
        averages = vars(leaf)[name]
        # Keras asks for an average of each variable, and those that gradients overwrite have none.
        averaged = {id(v): a for v, a in zip(leaf._trainable_variables, averages, strict=True) if a is not None}
        try:
            for variable in variables:
                if id(variable) in averaged:
                    # A copy: on JAX the variable would hold the average's own array, which a step cannot donate twice.
                    vars(leaf)[name] = [ops.copy(_in_dtype_of(variable, averaged[id(variable)]))]
                    leaf.finalize_variable_values([variable])
        finally:
            vars(leaf)[name] = averages


def _apply_to_leaf(
    leaf: keras.optimizers.Optimizer, changing: list[Any], grads: list[Any], variables: list[keras.Variable]
) -> None:
    variables = [v.variable if isinstance(v, Unconstrained) else v for v in variables]

    def update(grads: list[Any]) -> None:
        grads = leaf._clip_gradients(grads)
        leaf._apply_weight_decay([variable for variable in variables if not is_narrow(variable)])
        leaf._backend_update_step(grads, variables, leaf.learning_rate)
        if leaf.use_ema:
            leaf._update_model_variables_moving_average(
                [WideWeight(v) if is_narrow(v) else v for v in leaf._trainable_variables]
            )

    in_one_program(leaf, update, grads)
    if leaf.use_ema and leaf.ema_overwrite_frequency:
        is_due = ops.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
        backend.conditional(is_due, lambda _: _overwrite_with_averages(leaf), lambda _: None, [], changing)


def _in_dtype_of(variable: keras.Variable, average: Any) -> Any:
    return ops.cast(average, variable.dtype) if is_narrow(variable) else average


def _overwrite_with_gradients(grads: list[Any], variables: list[keras.Variable]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(grads, variables, strict=True))
    for gradient, variable in pairs:
        if is_overwritten(variable):
            variable.assign(gradient)
    rest = [(gradient, variable) for gradient, variable in pairs if not is_overwritten(variable)]
    # The constraint of a bfloat16 weight is a part of its update, which rounds but once.
    stand_in = [Unconstrained(v) if is_narrow(v) and v.constraint is not None else v for _, v in rest]
    return [gradient for gradient, _ in rest], stand_in


def _overwrite_with_averages(optimizer: keras.optimizers.Optimizer) -> None:
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    averaged = [(variable, average) for variable, average in pairs if average is not None]
    values = [_in_dtype_of(variable, average) for variable, average in averaged]
    backend.overwrite([variable for variable, _ in averaged], values)
