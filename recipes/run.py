"""Runs a training recipe of this folder, found by its name, or another, by its path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_mp.training.run_recipe import find_recipe, run_recipe

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> int:
    """Trains: `python -m recipes`; see `keras_mp.training.run_recipe.run_recipe`."""
    return run_recipe(arguments, "python -m recipes", FOLDER)


def step(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Builds what a training recipe trains, and a batch or its shapes, without training.

    Args:
        arguments: the training recipe, then its options.
    """
    recipe = find_recipe(arguments[0], FOLDER)
    return recipe.step(recipe.config(arguments[1:], f"python -m recipes {arguments[0]}"))


def batches(arguments: Sequence[str]) -> Any:
    """Reads a training recipe's data, without training; None where it has no function for that.

    Args:
        arguments: the training recipe, then its options.
    """
    recipe = find_recipe(arguments[0], FOLDER)
    return recipe.batches(recipe.config(arguments[1:], f"python -m recipes {arguments[0]}"))
