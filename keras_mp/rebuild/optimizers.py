"""What a model was compiled with, and its optimizers: arguments, variables, settings and state carried over."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.rebuild.arguments import same
from keras_mp.rebuild.walk import Config, Walk, copy_value


class Slot(NamedTuple):
    """A variable of an optimizer, perhaps in fewer bits."""

    name: str  # the attributes that lead to it, joined by "."
    weight: keras.Variable | None  # the weight that the slot belongs to, or None
    variable: Any  # the variable, as the optimizer reads and assigns it


def optimizer_slots(optimizer: keras.optimizers.Optimizer, prefix: str = "") -> list[Slot]:
    """Lists the variables of an optimizer and of those inside."""
    # Private, because optimizers publish their variables only as one flat list. A slot is kept in a list with a place
    # for each weight, in the order of `_trainable_variables`.
    weights = list(getattr(optimizer, "_trainable_variables", ()))
    slots = []
    for attribute, value in vars(optimizer).items():
        if attribute in ("_variables", "_trainable_variables") or attribute.startswith(("_self_", "_keras_mp_")):
            continue
        name = prefix + ("gradient_sums" if attribute in ("_sums", "_accumulated_gradients") else attribute)
        if isinstance(value, keras.optimizers.Optimizer):
            slots += optimizer_slots(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            paired = len(value) == len(weights)
            for index, item in enumerate(value):
                if isinstance(item, keras.optimizers.Optimizer):
                    slots += optimizer_slots(item, f"{name}.{index}.")
                elif _is_slot(item):
                    slots.append(Slot(name if paired else f"{name}.{index}", weights[index] if paired else None, item))
        elif _is_slot(value):
            slots.append(Slot(name, None, value))
    return list({id(slot.variable): slot for slot in slots}.values())


def stored_variables(slot: Any) -> list[keras.Variable]:
    """Variables in which a slot is stored."""
    return [slot] if isinstance(slot, keras.Variable) else slot.variables


def _is_slot(value: Any) -> bool:
    return isinstance(value, keras.Variable) or (hasattr(value, "assign") and hasattr(value, "variables"))


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Optimizer inside one that scales the loss; any other itself."""
    wraps = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if wraps else optimizer


def leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Optimizers with settings: itself, or those inside a MultiOptimizer."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Optimizers that are attributes of a model."""
    held = {"optimizer": getattr(model, "optimizer", None), **vars(model)}
    return {name: value for name, value in held.items() if isinstance(value, keras.optimizers.Optimizer)}


def held_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Finds each optimizer of a model and its layers.

    They are attributes, or in a list or dict that is one. Not those with which inner models are compiled, which the
    step of the outer one does not use.

    Returns:
        The optimizers, by the name of the attribute, that of a layer before it, and the key in a list or dict behind.
    """
    optimizers: dict[str, keras.optimizers.Optimizer] = {}
    for layer in Walk(model).every:
        prefix = "" if layer is model else f"{layer.name}_"
        attributes = dict(vars(layer))
        if layer is model:
            attributes = {"optimizer": getattr(model, "optimizer", None), **attributes}
        elif isinstance(layer, keras.Model):
            attributes.pop("optimizer", None)
        for attribute, value in attributes.items():
            if attribute.startswith("_self_"):  # TensorFlow's own lists of what a checkpoint holds
                continue
            name = prefix + attribute.lstrip("_")
            if isinstance(value, (list, tuple)):
                named = [(f"{name}_{index}", item) for index, item in enumerate(value)]
            elif isinstance(value, dict):
                named = [(f"{name}_{key}", item) for key, item in value.items()]
            else:
                named = [(name, value)]
            for key, item in named:
                is_new = all(item is not other for other in optimizers.values())
                if isinstance(item, keras.optimizers.Optimizer) and is_new:
                    while key in optimizers:  # `_name` and `name`
                        key = f"_{key}"
                    optimizers[key] = item
    return optimizers


def without_default(optimizers: dict[str, keras.optimizers.Optimizer]) -> dict[str, keras.optimizers.Optimizer]:
    """Leaves out `optimizer` beside others: Keras's default, which is idle."""
    return {name: held for name, held in optimizers.items() if name != "optimizer"} or optimizers


def fresh_optimizer(optimizer: keras.optimizers.Optimizer, **settings: Any) -> keras.optimizers.Optimizer:
    """Makes an optimizer of the same class, registered or not.

    It is not built, and leaves out of weight decay the same weights of the same model.

    Args:
        settings: settings of its config, in place of its own.
    """
    classes = {type(held) for held in _with_held(optimizer)}
    names = {name: cls for cls in classes for name in (cls.__name__, keras.saving.get_registered_name(cls))}
    with keras.saving.custom_object_scope(names):
        fresh = type(optimizer).from_config({**optimizer.get_config(), **settings})
    for old, new in zip(_with_held(optimizer), _with_held(fresh), strict=True):
        for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
            if hasattr(old, name):  # private: no config of Keras has them
                setattr(new, name, getattr(old, name))
    return fresh


def move_exclusions(
    optimizer: keras.optimizers.Optimizer, weights: Iterable[tuple[keras.Variable, keras.Variable]]
) -> None:
    """Moves exclusions from weight decay to another model's weights.

    Args:
        weights: pairs of a weight that the optimizer may leave out, and of the weight which takes its place.
    """
    for held in _with_held(optimizer):
        excluded = getattr(held, "_exclude_from_weight_decay", None)
        if excluded:
            held._exclude_from_weight_decay = {
                held._var_key(new) for old, new in weights if held._var_key(old) in excluded
            }


def _with_held(optimizer: keras.optimizers.Optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """An optimizer and those it holds, in order of attributes."""
    yield optimizer
    for value in vars(optimizer).values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, keras.optimizers.Optimizer) and item is not optimizer:
                yield from _with_held(item)


def carry_slots(
    old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer, variables: dict[int, keras.Variable]
) -> list[str]:
    """Copies an optimizer's state to another; slots follow weights.

    Args:
        variables: the weight of the new model that takes the place of each weight of the old one, by the latter's id.

    Returns:
        A sentence for each variable that was not carried over.
    """
    places = {(slot.name, id(slot.weight)): slot.variable for slot in optimizer_slots(new)}
    reached: set[int] = set()
    for name, weight, slot in optimizer_slots(old):
        if weight is not None and id(weight) not in variables:
            continue
        place = places.get((name, id(None if weight is None else variables[id(weight)])))
        if place is None or tuple(slot.shape) != tuple(place.shape):
            continue
        parts = stored_variables(slot), stored_variables(place)
        if [part.dtype for part in parts[0]] == [part.dtype for part in parts[1]]:
            for one, other in zip(*parts, strict=True):
                copy_value(one, other)
        elif slot.dtype == "float32":
            place.assign(slot.numpy())
        else:
            copy_value(slot, place)
        reached.update(map(id, parts[0]))
    return [f"optimizer variable {v.path!r} was not carried over" for v in old.variables if id(v) not in reached]


def exchange_optimizer(model: keras.Model, name: str, optimizer: Any, lost: list[str], stacklevel: int) -> None:
    """Puts an optimizer in another's place; warns of lost state."""
    if lost:
        warnings.warn(f"the optimizer of {model.name!r} begins anew in part: {'; '.join(lost)}", stacklevel=stacklevel)
    setattr(model, name, optimizer)
    # Private, because what a model was compiled with is saved from there.
    if name in model._compile_config.config:
        model._compile_config.config[name] = optimizer


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

    One that keeps what it made of an argument, such as a loss with a weight, would make it of that again.
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
