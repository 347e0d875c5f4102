"""Carries over arguments of `compile` and states of optimizers."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from keras_mp.rebuild.arguments import same
from keras_mp.rebuild.optimizers import carry_slots, fresh_optimizer, move_exclusions, optimizers_of, unwrapped
from keras_mp.rebuild.walk import Config


def carry_compiled(old: keras.Model, new: keras.Model, variables: dict[int, keras.Variable]) -> list[str]:
    own_compile = type(old).compile is not keras.Model.compile
    config = old.get_compile_config() if own_compile else None
    if config and type(old).compile_from_config is not keras.Model.compile_from_config:
        new.compile_from_config(config)
    elif own_compile:
        if not _compiled_by_arguments(old, new):
            name = type(old).__name__
            return [
                f"compile arguments: {name} overrides compile() without get_compile_config() and "
                "compile_from_config(), and does not keep every argument as it was given; compile the new model "
                "yourself"
            ]
        if _scales(new.optimizer) and not _scales(old.optimizer):
            new.optimizer = new.optimizer.inner_optimizer  # auto_scale_loss=False, which Keras does not keep
    else:
        # Private, because the public get_compile_config() is already serialized and loses what is not registered.
        arguments = keras.tree.map_structure(_fresh, dict(old._compile_config.config))
        if old.dtype_policy.name == "mixed_float16" and not _scales(old.optimizer):
            arguments["auto_scale_loss"] = False  # asked for, but not among the arguments that Keras keeps
        new.compile(**arguments)
    lost: list[str] = []
    weights = [(weight, variables[id(weight)]) for weight in old.trainable_variables if id(weight) in variables]
    seen: set[int] = set()
    for name, old_optimizer in optimizers_of(old).items():
        new_optimizer = optimizers_of(new).get(name)
        if new_optimizer is None or id(old_optimizer) in seen:
            continue
        seen.add(id(old_optimizer))
        move_exclusions(new_optimizer, weights)
        if not old_optimizer.built:
            continue
        trained = unwrapped(old_optimizer)._trainable_variables
        ours = [variables[id(weight)] for weight in trained if id(weight) in variables]
        new_optimizer.build(new.trainable_variables if name == "optimizer" else ours)
        if _scales(old_optimizer) != _scales(new_optimizer):
            old_optimizer, new_optimizer = unwrapped(old_optimizer), unwrapped(new_optimizer)
        lost += carry_slots(old_optimizer, new_optimizer, variables)
    return lost


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def compile_again(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compiles a model with another optimizer; metrics start anew.

    Raises:
        TypeError: If the model has a compile() of its own that does not keep every argument as it was given.
    """
    arguments = compile_arguments(model)
    if arguments is None or "optimizer" not in arguments:
        raise TypeError(
            f"{type(model).__name__} has a compile() of its own, which does not keep every argument as it was given: "
            "compile the model with the optimizer that it is to have"
        )
    arguments = keras.tree.map_structure(_fresh, arguments)
    arguments["optimizer"] = optimizer
    if _scales(optimizer):
        arguments["auto_scale_loss"] = False  # it does so itself
    model.compile(**arguments)


def compile_arguments(model: keras.Model) -> Config | None:
    """Arguments that a model was compiled with, or None."""
    own_compile = type(model).compile is not keras.Model.compile
    return _kept_compile_arguments(model) if own_compile else dict(model._compile_config.config)


def _compiled_by_arguments(old: keras.Model, new: keras.Model) -> bool:
    """Compiles with kept arguments; whether the new model keeps them.

    One that hands on or keeps what it made of an argument, such as a loss with a weight, would make it of that again.
    """
    arguments = _kept_compile_arguments(old)
    if arguments is None:
        return False
    arguments = keras.tree.map_structure(_fresh, arguments)
    try:
        new.compile(**arguments)
    except Exception:  # whatever it raises on what it made itself
        new.compiled = False
        return False
    handed_on = new._compile_config.config
    new.compiled = all(
        same(handed_on[name] if name in handed_on else getattr(new, name, None), value)
        for name, value in arguments.items()
    )
    return new.compiled


def _kept_compile_arguments(model: keras.Model) -> Config | None:
    """Arguments of a `compile()` of the model's own, or None.

    Those that it hands on to Keras's are with Keras; the rest are attributes of the same name, where the usual
    `self.d_optimizer = d_optimizer` keeps them.
    """
    handed_on = dict(model._compile_config.config)
    _, *parameters = inspect.signature(type(model).compile).parameters.values()
    named = {parameter.name for parameter in parameters}
    arguments: Config = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {name: value for name, value in handed_on.items() if name not in named}
        elif parameter.name in handed_on:
            arguments[parameter.name] = handed_on[parameter.name]
        elif hasattr(model, parameter.name) and parameter.kind is not parameter.VAR_POSITIONAL:
            arguments[parameter.name] = getattr(model, parameter.name)
        else:
            return None
    return arguments


def _fresh(value: Any) -> Any:
    # Metrics and optimizers hold state, so two models must not share one; losses and functions hold none.
    if isinstance(value, keras.optimizers.Optimizer):
        return fresh_optimizer(value)
    return type(value).from_config(value.get_config()) if isinstance(value, keras.metrics.Metric) else value
