"""Makes a Keras optimizer clip, decay, update and average once, and nothing else: the rest of a step is done by then.

A Keras optimizer by itself accumulates gradients, and sums them over replicas, after clipping, in branches that a
distribution strategy refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.gradients import is_overwritten
from keras_mp.loss_scaling.state_creation import creating, has_slots, slots_of, state_dtype_of
from keras_mp.loss_scaling.state_files import load_with_dtypes
from keras_mp.loss_scaling.state_slot import StateSlot, updating
from keras_mp.loss_scaling.wide_weight import Unconstrained, WideWeight, is_narrow


class _Rounding(NamedTuple):
    """Of an update: the seed, how bfloat16 weights are rounded, and the number of the optimizer's first weight."""

    seed: int
    weights: str
    first: int


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


def check_state_dtype_of_built(optimizer: keras.optimizers.Optimizer, state_dtype: str) -> None:
    """Checks that the slots of an optimizer that is built are stored in a dtype.

    Raises:
        ValueError: If they are stored in another.
    """
    for leaf in leaves(optimizer):
        stored = state_dtype_of(leaf)
        if leaf.built and stored != state_dtype:
            raise ValueError(
                f"state_dtype={state_dtype!r} needs an optimizer that is not built, and {leaf.name!r} has its slots in "
                f"{stored} already: make a new one, for instance by type(optimizer).from_config("
                f"optimizer.get_config()), or pass state_dtype={stored!r}"
            )


def _check_slots(optimizer: keras.optimizers.Optimizer) -> None:
    for built in leaves(optimizer):
        narrow = next((variable for variable in built.variables if is_narrow(variable)), None)
        if built.built and narrow is not None and not has_slots(built):
            raise ValueError(
                f"optimizer {built.name!r} is built already, with {narrow.path!r} in bfloat16 as Keras makes it, whose "
                "changes would be lost: make a new one, for instance by type(optimizer).from_config("
                "optimizer.get_config())"
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


def build(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable], state_dtype: str = "float32") -> None:
    """Builds an optimizer without its own sums of gradients: ours are float32, and one for each replica.

    Args:
        optimizer: the optimizer.
        variables: the model's trainable variables.
        state_dtype: what its slots are stored in: "float32", "bfloat16" or "float8".

    Raises:
        ValueError: If it is built already, with slots in another dtype.
    """
    check_state_dtype_of_built(optimizer, state_dtype)
    _check_slots(optimizer)
    # The weights come first: they may be rounded with words of their own.
    numbers = itertools.count(len(variables))
    with ExitStack() as stack:
        entered = set()

        def enter(leaf: keras.optimizers.Optimizer) -> None:
            if id(leaf) not in entered:
                entered.add(id(leaf))
                stack.enter_context(_building(leaf, state_dtype, numbers))

        for leaf in leaves(optimizer):
            enter(leaf)
        stack.enter_context(_telling_of_leaves(optimizer, enter))
        optimizer.build(variables)
    for saved in (optimizer, *leaves(optimizer)) if state_dtype != "float32" else ():
        load_with_dtypes(saved)


@contextmanager
def _building(leaf: keras.optimizers.Optimizer, state_dtype: str, numbers: Iterator[int]) -> Iterator[None]:
    steps, leaf.gradient_accumulation_steps = leaf.gradient_accumulation_steps, None
    try:
        with creating(leaf, state_dtype, numbers):
            yield
    finally:
        leaf.gradient_accumulation_steps = steps


@contextmanager
def _telling_of_leaves(optimizer: keras.optimizers.Optimizer, enter: Callable[[Any], None]) -> Iterator[None]:
    """Tells of the optimizers that a MultiOptimizer learns of while it is built, from a function of each variable."""
    # Private: Keras asks the function again for no variable, and it may give a new optimizer each time.
    choose = vars(optimizer).get("_optimizer_map")

    def choosing(variable: keras.Variable) -> keras.optimizers.Optimizer:
        leaf = choose(variable)
        if isinstance(leaf, keras.optimizers.Optimizer):
            enter(leaf)
        return leaf

    if choose is None:
        yield
        return
    vars(optimizer)["_optimizer_map"] = choosing
    try:
        yield
    finally:
        vars(optimizer)["_optimizer_map"] = choose


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
            update_step=partial(_update_step, leaf, _Rounding(seed, weight_rounding, first)),
            _var_key=partial(_key_of, leaf),
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
        own = [variable for variable in variables if id(variable) in averaged]
        vars(leaf)[name] = [_in_dtype_of(variable, averaged[id(variable)]) for variable in own]
        try:
            leaf.finalize_variable_values(own)
        finally:
            vars(leaf)[name] = averages


def _apply_to_leaf(
    leaf: keras.optimizers.Optimizer, changing: list[Any], grads: list[Any], variables: list[keras.Variable]
) -> None:
    variables = [v.variable if isinstance(v, Unconstrained) else v for v in variables]
    grads = leaf._clip_gradients(grads)
    leaf._apply_weight_decay([variable for variable in variables if not is_narrow(variable)])
    leaf._backend_update_step(grads, variables, leaf.learning_rate)
    if not leaf.use_ema:
        return
    leaf._update_model_variables_moving_average(
        [WideWeight(v) if is_narrow(v) else v for v in leaf._trainable_variables]
    )
    if leaf.ema_overwrite_frequency:
        is_due = ops.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
        backend.conditional(is_due, lambda _: _overwrite_with_averages(leaf), lambda _: None, [], changing)


def _update_step(
    leaf: keras.optimizers.Optimizer, how: _Rounding, gradient: Any, variable: Any, learning_rate: Any
) -> None:
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


def _key_of(leaf: keras.optimizers.Optimizer, variable: Any) -> Any:
    return type(leaf)._var_key(leaf, variable.values if isinstance(variable, WideWeight) else variable)


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
