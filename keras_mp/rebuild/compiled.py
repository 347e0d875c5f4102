"""The arguments of `compile` and the optimizer's state, carried over."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.rebuild.arguments import same
from keras_mp.rebuild.fresh_optimizer import fresh_optimizer, move_exclusions
from keras_mp.rebuild.rule import Config
from keras_mp.rebuild.state import copy_value


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
                "compile_from_config(), and keeps not every argument as it was given; compile the new model yourself"
            ]
        scaler = keras.optimizers.LossScaleOptimizer
        if isinstance(new.optimizer, scaler) and not isinstance(old.optimizer, scaler):
            new.optimizer = new.optimizer.inner_optimizer  # auto_scale_loss=False, which Keras does not keep
    else:
        # Private, because the public get_compile_config() is already serialized and loses what is not registered.
        arguments = keras.tree.map_structure(_fresh, dict(old._compile_config.config))
        if old.dtype_policy.name == "mixed_float16" and not isinstance(
            old.optimizer, keras.optimizers.LossScaleOptimizer
        ):
            arguments["auto_scale_loss"] = False  # asked for, but not among the arguments that Keras keeps
        new.compile(**arguments)
    lost: list[str] = []
    weights = [(weight, variables[id(weight)]) for weight in old.trainable_variables if id(weight) in variables]
    for name, old_optimizer, new_optimizer in _optimizers(old, new):
        move_exclusions(new_optimizer, weights)
        if not old_optimizer.built:
            continue
        trained = getattr(old_optimizer, "inner_optimizer", old_optimizer)._trainable_variables
        ours = [variables[id(weight)] for weight in trained if id(weight) in variables]
        new_optimizer.build(new.trainable_variables if name == "optimizer" else ours)
        lost += carry_slots(
            _unwrapped(old_optimizer, new_optimizer), _unwrapped(new_optimizer, old_optimizer), variables
        )
    return lost


def compile_again(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compiles a model with its own arguments and another optimizer; metrics start anew.

    Raises:
        TypeError: If the model has a compile() of its own that keeps not every argument as it was given.
    """
    own_compile = type(model).compile is not keras.Model.compile
    arguments = _kept_compile_arguments(model) if own_compile else dict(model._compile_config.config)
    if arguments is None or "optimizer" not in arguments:
        raise TypeError(
            f"{type(model).__name__} has a compile() of its own, which keeps not every argument as it was given: "
            "compile the model with the optimizer that it is to have"
        )
    arguments = keras.tree.map_structure(_fresh, arguments)
    arguments["optimizer"] = optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        arguments["auto_scale_loss"] = False  # it does so itself
    model.compile(**arguments)


def _compiled_by_arguments(old: keras.Model, new: keras.Model) -> bool:
    """Compiles with the arguments that a `compile()` of the model's own kept; whether the new model keeps the same.

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
    """The arguments that a `compile()` of the model's own was called with, if the model still has each.

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


def _optimizers(
    old: keras.Model, new: keras.Model
) -> Iterator[tuple[str, keras.optimizers.Optimizer, keras.optimizers.Optimizer]]:
    """The optimizers of two models, such as a GAN's two, side by side, by the attributes that hold them."""
    seen: set[int] = set()
    for name in ("optimizer", *vars(old)):
        pair = (getattr(old, name, None), getattr(new, name, None))
        if all(isinstance(optimizer, keras.optimizers.Optimizer) for optimizer in pair) and id(pair[0]) not in seen:
            seen.add(id(pair[0]))
            yield (name, *pair)


def _unwrapped(optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The inner optimizer where only one of the two is a loss-scaling wrapper."""
    wrapper = keras.optimizers.LossScaleOptimizer
    return optimizer.inner_optimizer if isinstance(optimizer, wrapper) and not isinstance(other, wrapper) else optimizer


def carry_slots(
    old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer, variables: dict[int, keras.Variable]
) -> list[str]:
    """Copies optimizer state; slots follow their weight, whatever its place in the new model's order."""
    reached = _copy_optimizer(old, new, variables)
    return [f"optimizer variable {v.path!r} was not carried over" for v in old.variables if id(v) not in reached]


def _copy_optimizer(
    old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer, variables: dict[int, keras.Variable]
) -> set[int]:
    reached: set[int] = set()

    def copy(old_slot: Any, new_slot: Any) -> None:
        if new_slot is None or tuple(old_slot.shape) != tuple(new_slot.shape):
            return
        old_parts, new_parts = _stored(old_slot), _stored(new_slot)
        if [part.dtype for part in old_parts] == [part.dtype for part in new_parts]:
            for old_part, new_part in zip(old_parts, new_parts, strict=True):
                copy_value(old_part, new_part)
        elif old_slot.dtype == "float32":
            new_slot.assign(old_slot.numpy())
        else:
            copy_value(old_slot, new_slot)
        reached.update(map(id, old_parts))

    # Private, because optimizers publish their variables only as one flat list. A slot is kept in a list with a place
    # for each weight, in the order of `_trainable_variables`.
    old_weights = list(old._trainable_variables)
    place = {id(variable): index for index, variable in enumerate(new._trainable_variables)}
    for name, value in vars(old).items():
        other = getattr(new, name, None)
        if isinstance(value, keras.Variable):
            copy(value, other)
        elif isinstance(value, keras.optimizers.Optimizer):
            reached |= _copy_optimizer(value, other, variables)
        elif isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)) and name != "_trainable_variables":
            if any(isinstance(item, keras.optimizers.Optimizer) for item in value):
                for old_inner, new_inner in zip(value, other, strict=True):
                    reached |= _copy_optimizer(old_inner, new_inner, variables)
            elif name != "_variables" and len(value) == len(old_weights) and len(other) == len(place):
                for weight, slot in zip(old_weights, value, strict=True):
                    index = place.get(id(variables.get(id(weight))))
                    if hasattr(slot, "assign") and index is not None:
                        copy(slot, other[index])
    return reached


def _stored(slot: Any) -> list[keras.Variable]:
    """The variables of a slot: itself, or those of one that is stored in fewer bits than it is read in."""
    return [slot] if isinstance(slot, keras.Variable) else slot.variables
