"""The same model with fewer of its equal blocks: by the function that builds it, or by the config of KerasHub's."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import keras

from keras_mp import backend
from keras_mp.rebuild import has_no_value, layers_by_path, own_variables
from keras_mp.rebuild.compiled import carry_compiled
from keras_mp.rebuild.notes import treatments_of
from keras_mp.system.packages import package_of

# A model with more equal blocks than DEEP is asked about by models with so many. They take a compiler for GPUs as long
# as one with twice their sum, because it compiles equal kernels once. With 2 a TPU's fetches weights further ahead, and
# needs more memory than with 4.
BLOCKS = (4, 8)
DEEP = 2 * sum(BLOCKS)
# How a backbone of KerasHub calls the number of its blocks.
_NUMBER = "num_layers"


def takes_blocks(build: Callable[..., Any]) -> int:
    """The default of a function's parameter `blocks`; 0 where it has none.

    Raises:
        TypeError: If the default is not a number.
    """
    try:
        parameter = inspect.signature(build).parameters.get("blocks")
    except ValueError:  # a function that is not Python's
        return 0
    if parameter is None:
        return 0
    if not isinstance(parameter.default, int):
        raise TypeError("the parameter blocks of build must have the model's number of blocks as its default")
    return parameter.default


def blocks_of(model: keras.Model) -> int:
    """How many blocks a model of KerasHub has by its config; 0 where it has no such number, and for other models."""
    backbone = getattr(model, "backbone", model)
    if package_of(type(backbone)) != "keras_hub":
        return 0
    number = backbone.get_config().get(_NUMBER)
    return number if isinstance(number, int) else 0


def with_blocks(model: keras.Model, blocks: int) -> keras.Model:
    """Builds a backbone or task of KerasHub with another number of blocks, from its config, and compiles it alike.

    Raises:
        ValueError: If it cannot be compiled by the arguments that it keeps.
    """
    backbone = getattr(model, "backbone", model)
    with backend.no_allocation() if any(map(has_no_value, model.variables)) else nullcontext():
        new = type(backbone).from_config(backbone.get_config() | {_NUMBER: blocks})
        if backbone is not model:
            new = type(model).from_config(model.get_config() | {"backbone": new, "preprocessor": None})
        carry_compiled(model, new, {})
    if not new.compiled:
        raise ValueError(f"model {model.name!r} cannot be compiled again by the arguments that it keeps")
    return new


def is_on_line(few: keras.Model, many: keras.Model, whole: keras.Model, times: Fraction) -> bool:
    """Whether a model has, of each kind of layer, what it has by the line through models with fewer blocks.

    A kind is a class, what is done to it, its policy, and the shapes of its weights. So a model whose config does not
    say all of it, as one with LoRA or frozen weights, is not on the line, nor is one whose blocks alternate otherwise.

    Args:
        few, many, whole: three built models: with few blocks, with more, and with all.
        times: the number of times that the growth from few to many is added to reach all.
    """
    start, end, everything = map(_kinds, (few, many, whole))
    kinds = start | end | everything
    return start != end and all(start[k] + times * (end[k] - start[k]) == everything[k] for k in kinds)


def _kinds(model: keras.Model) -> Counter[Any]:
    return Counter(
        (
            type(layer).__qualname__,
            tuple(treatments_of(layer)),
            layer.dtype_policy.name,
            tuple((tuple(weight.shape), weight.dtype, weight.trainable) for weight in own_variables(layer)),
        )
        for layer in layers_by_path(model).values()
    )
