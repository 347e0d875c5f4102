"""An optimizer with the settings of another and none of its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras


def fresh_optimizer(optimizer: keras.optimizers.Optimizer, **settings: Any) -> keras.optimizers.Optimizer:
    """Makes an optimizer of the same class, also where the class is not registered with Keras.

    Args:
        optimizer: the other, which may hold optimizers.
        settings: of its config, in place of its own.

    Returns:
        One that is not built, and leaves out of weight decay the same weights of the same model.
    """
    classes = {type(held) for held in _with_held(optimizer)}
    names = {name: cls for cls in classes for name in (cls.__name__, keras.saving.get_registered_name(cls))}
    with keras.saving.custom_object_scope(names):
        fresh = type(optimizer).from_config({**optimizer.get_config(), **settings})
    for old, new in zip(_with_held(optimizer), _with_held(fresh), strict=True):
        _keep_exclusions(old, new)
    return fresh


def move_exclusions(
    optimizer: keras.optimizers.Optimizer, weights: Iterable[tuple[keras.Variable, keras.Variable]]
) -> None:
    """Makes an optimizer of `fresh_optimizer` leave out of weight decay the weights of another model.

    Args:
        optimizer: not built.
        weights: pairs of a weight that the optimizer may leave out, and of that which takes its place.
    """
    for held in _with_held(optimizer):
        excluded = getattr(held, "_exclude_from_weight_decay", None)
        if excluded:
            held._exclude_from_weight_decay = {
                held._var_key(new) for old, new in weights if held._var_key(old) in excluded
            }


def _keep_exclusions(old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    # Private: no config of Keras has them.
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def _with_held(optimizer: keras.optimizers.Optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """An optimizer, and those that it holds, in the order of its attributes."""
    yield optimizer
    for value in vars(optimizer).values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, keras.optimizers.Optimizer) and item is not optimizer:
                yield from _with_held(item)
