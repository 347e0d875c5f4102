"""What loss scaling needs of JAX: a step undone, kinds of gradients, variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras


def atomic_step(
    model: keras.Model,
    train_step: Callable[..., Any],
    skips: list[keras.Variable],
    variables: list[keras.Variable],
    results: Callable[[dict, Any], dict],
    state: tuple,
) -> Any:
    """Makes a step; if skipped, undoes what else it changed.

    The arguments are those of `_tensorflow`, but of one optimizer, and `state` is (values, batch), with the values of
    trainable, non-trainable, optimizer's and metrics' variables. Returns (logs, new values).
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


def share_of_batch() -> None:
    """Returns None: JAX's devices have as many rows each."""


def is_variable(thing: Any) -> bool:
    """Tells whether something is a variable."""
    return isinstance(thing, keras.Variable)


def as_keras_variable(variable: keras.Variable) -> Any:
    """Returns the variable, or None where it has no value."""
    return variable if variable._value is not None else None
