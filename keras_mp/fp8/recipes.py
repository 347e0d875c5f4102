"""The scaling recipes that have a name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_mp.fp8.int8_scaling import Int8Scaling
from keras_mp.fp8.mxfp8_scaling import MXFP8Scaling
from keras_mp.fp8.scaling import CurrentScaling, DelayedScaling, RowwiseScaling
from keras_mp.fp8.scaling_recipe import Recipe
from keras_mp.fp8.static_scaling import StaticScaling

RECIPES: dict[str, Callable[[], Recipe]] = {
    "current": CurrentScaling,
    "delayed": DelayedScaling,
    "static": StaticScaling,
    "rowwise": RowwiseScaling,
    "mxfp8": MXFP8Scaling,
    "int8": Int8Scaling,
    "int8_current": functools.partial(Int8Scaling, "current"),
}


def get_recipe(recipe: Any = None) -> Recipe:
    """Finds a scaling recipe.

    Args:
        recipe: a scaling recipe, its name ("current", "delayed", "static", "rowwise", "mxfp8", "int8" or
            "int8_current"), its serialized config, or None for `CurrentScaling()`.

    Returns:
        The scaling recipe.

    Raises:
        ValueError: it is none of these.
    """
    if recipe is None:
        return CurrentScaling()
    if isinstance(recipe, dict):
        recipe = keras.saving.deserialize_keras_object(recipe)
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]()
    known = ", ".join(repr(name) for name in RECIPES)
    raise ValueError(
        f"recipe={recipe!r} is unknown: use {known}, or a scaling recipe such as CurrentScaling(power_of_two=True)"
    )
