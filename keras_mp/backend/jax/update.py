"""A step's update, or none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.jax.devices import traced_chip


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether every value of some arrays is finite: a boolean array of shape ()."""
    return jnp.stack([jnp.all(jnp.isfinite(tensor)) for tensor in tensors]).all()


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None] | None,
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which may assign to variables; they may read no others.

    Args:
        condition: a boolean array of shape ().
        then: a function that is called with the argument where the condition is true.
        otherwise: a function that is called with the argument where the condition is false; None for none.
        argument: a structure of arrays.
        variables: the variables that either may change.
        prepare: a function that is applied to the argument before `then` takes it. It is applied within the branch: XLA
            makes it part of the loops there, and before the branch it would be a loop of its own, over all of memory.
    """

    def prepared(argument: Any) -> None:
        then(argument if prepare is None else prepare(argument))

    if not isinstance(condition, jax.core.Tracer):
        function = prepared if condition else otherwise
        if function is not None:
            function(argument)  # eagerly, as without a condition
        return

    def values_after(function: Callable[[Any], None], before: list[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            function(argument)
        return [scope.get_current_value(variable) for variable in variables]

    after = [variable.value for variable in variables]
    if _is_for_cpu():
        branches = [partial(values_after, function) for function in (prepared, otherwise or (lambda _: None))]
        after = jax.lax.cond(condition, *branches, after)
    else:
        # XLA writes the results of a branch beside its arguments, a copy of all weights and slots, and those of a loop
        # in their place. On a CPU it moves parts of the update out of the loop, which are then rounded otherwise.
        for runs, function in ((condition, prepared), (jnp.logical_not(condition), otherwise)):
            if function is not None:
                body = partial(values_after, function)
                after = jax.lax.fori_loop(0, runs.astype("int32"), lambda _, before, body=body: body(before), after)
    for variable, value in zip(variables, after, strict=True):
        variable.assign(value)


def _is_for_cpu() -> bool:
    return traced_chip().platform == "cpu"


def update_if(
    condition: Any,
    update: Callable[[Any], None],
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls a function that assigns to variables, and where the condition is false leaves them as they were.

    In a step jitted for an accelerator the update is made in any case, and a variable takes its new value or its old
    one within the same kernel. Behind a condition all gradients would wait in memory in float32, and a GPU would stop
    to ask its host which branch to run. A clipping norm may then be rounded otherwise than without the condition, so a
    CPU, which gains nothing, has the condition.

    Args:
        condition: a boolean array of shape ().
        update: a function that is called with the argument.
        argument: a structure of arrays.
        variables: the variables that it may change.
        prepare: a function that is applied to the argument before.
    """
    if _is_for_cpu() or not isinstance(condition, jax.core.Tracer):
        conditional(condition, update, None, argument, variables, prepare)
        return
    with keras.StatelessScope(state_mapping=[(variable, variable.value) for variable in variables]) as scope:
        update(argument if prepare is None else prepare(argument))
    for variable in variables:
        old, new = variable.value, scope.get_current_value(variable)
        if new is not old:
            variable.assign(jnp.where(condition, new, old))


def overwrite(variables: list[keras.Variable], values: list[Any]) -> None:
    """Assigns to each variable a value, or that of another variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.value if isinstance(value, keras.Variable) else value)


def atomic_step(
    model: keras.Model,
    train_step: Callable[..., Any],
    skips: list[keras.Variable],
    variables: list[keras.Variable],
    results: Callable[[dict, Any], dict],
    state: tuple,
) -> Any:
    """Makes a training step, and if its optimizer skipped it, puts back what else it had changed.

    Args:
        model: a compiled Keras model.
        train_step: the step, from (state, batch) to (logs, state).
        skips: the number of skipped steps in all of the model's optimizer, alone in a list.
        variables: the variables to put back.
        results: a function that makes the logs of the step's own and of whether it was skipped, after the metrics were
            put back; it may assign to variables of the optimizer.
        state: the arguments of the step: (values, batch), and of the values those of the model's trainable,
            non-trainable, optimizer's and metrics' variables.

    Returns:
        (logs, state), metrics in the logs as they are after the step.
    """
    logs, new = train_step(*state)
    _, passive, old_optimizer, metrics = state[0]
    trainable, new_passive, optimizer, new_metrics = new
    held = model.optimizer.variables
    place = next(i for i, variable in enumerate(held) if variable is skips[0])
    skipped = optimizer[place] > old_optimizer[place]
    restored = {id(variable) for variable in variables}

    def choose(kind: list[Any], before: list[Any], after: list[Any]) -> list[Any]:
        return [
            jnp.where(skipped, old, new) if id(variable) in restored else new
            for variable, old, new in zip(kind, before, after, strict=True)
        ]

    passive = choose(model.non_trainable_variables, passive, new_passive)
    metrics = choose(model.metrics_variables, metrics, new_metrics)
    mapping = [*zip(model.metrics_variables, metrics, strict=True), *zip(held, optimizer, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        logs = results(logs, skipped)
    optimizer = [scope.get_current_value(variable) for variable in held]
    return logs, (trainable, passive, optimizer, metrics)


def is_concrete(tensor: Any) -> bool:
    """Tells whether a tensor has a value now, and is no part of a program that is being traced."""
    return not isinstance(tensor, jax.core.Tracer)
