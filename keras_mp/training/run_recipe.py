"""Runs a training recipe with the command line it is given."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from keras_mp.parallel.cluster import find_cluster
from keras_mp.parallel.coordinator import DisagreementError, LostWorkerError
from keras_mp.system.quiet_import import import_keras
from keras_mp.training.find_recipe import WHERE, find_recipe, module_name, recipes_in
from keras_mp.training.training_recipe import TrainingRecipe


def run_recipe(arguments: Sequence[str], program: str = "keras-mp train", folder: Path | None = None) -> int:
    """Trains as a command line says.

    Args:
        arguments: the training recipe, then its options: `["digits", "--epochs", "3"]`; none, or `--help`,
            lists them all.
        program: what the user typed before them, for the help.
        folder: where bare names are looked up; by default `recipes` in the current folder.

    Returns:
        The exit status: 0, 1 for a mistake of the user's (told in a line; set KERAS_MP_TRACEBACK to see where), 130
        after ctrl-C.
    """
    # absl writes pages about folders before the first line of ours.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(program, folder))
        return 0
    try:
        import_keras()
        recipe = find_recipe(arguments[0], folder)
        config = recipe.config(arguments[1:], f"{program} {arguments[0]}")
        with _together(config, recipe):
            return 130 if recipe.train(config) else 0
    except KeyboardInterrupt:
        print("stopped at once: only the finished files of the run are kept", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError, LostWorkerError, DisagreementError) as error:
        if os.environ.get("KERAS_MP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _help(program: str, folder: Path | None) -> str:
    recipes = recipes_in(folder)
    lines = [f"usage: {program} TRAINING_RECIPE [--help] [--option value ...]", "", "training recipes:"]
    lines += [f"  {name:<20} {text}" for name, text in recipes.items()]
    if not recipes:
        lines.append(f"  none in {str(Path('recipes').absolute())!r}: {WHERE}")
    lines.append("  path/to/mine.py      a file of yours, with a function of its own name and train(config)")
    lines.append("  module:function      a function that returns the config; train(config) is in the same module")
    return "\n".join(lines)


def _together(config: Any, recipe: TrainingRecipe) -> AbstractContextManager[None]:
    """Joins the processes that train together, where there are any; before TensorFlow or JAX compute anything."""
    from keras_mp.parallel.workers import join  # not above, because it imports Keras

    cluster = find_cluster(getattr(config, "hosts", None), getattr(config, "host_index", None))
    settings = {name: value for name, value in vars(config).items() if name not in ("hosts", "host_index", "output")}
    folder = getattr(config, "output", None) or "."  # where the checkpoints are, which all must see
    return join(cluster, {"recipe": recipe.given, **settings}, code=[module_name(recipe.file)[1]], folder=folder)
