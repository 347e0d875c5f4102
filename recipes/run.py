"""Runs a recipe, found by its name or its path, with the command line it is given."""

import ast
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_mp.parallel.cluster import find_cluster
from keras_mp.parallel.coordinator import DisagreementError, LostWorkerError
from keras_mp.system.quiet_import import import_keras
from recipes.common.options import nearest, parse


def recipes() -> dict[str, str]:
    """Lists the recipes of this folder: each file that defines a function of its own name.

    Returns:
        The first line of each recipe's docstring, by its name.
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def find(recipe: str) -> ModuleType:
    """Imports a recipe: a name, or the path of a Python file.

    The file defines a function of its own name, which returns the config, and `train(config)`.

    Args:
        recipe: for example `"digits"` or `"mine/digits_wide.py"`.

    Returns:
        The module.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no recipe of that name (names the nearest), or the file is no recipe.
    """
    path = Path(recipe)
    if path.suffix != ".py":
        if recipe not in recipes():
            raise ValueError(f"unknown recipe {recipe}: {nearest(recipe, list(recipes()))}; or the path of a .py file")
        return importlib.import_module(f"recipes.{recipe}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {recipe}")
    specification = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert specification is not None and specification.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(specification)
    # Dataclasses and Keras's serialization look a class's module up by its name.
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    missing = [name for name in (path.stem, "train") if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(f"{recipe} is no recipe: it defines no function {' and no function '.join(missing)}")
    return module


def step(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Builds what a recipe trains, and the shapes of a batch, without training.

    Args:
        arguments: the recipe, then its options.

    Returns:
        What the recipe's function `step` returns: a compiled model and a batch.

    Raises:
        ValueError: the recipe has no function `step(config)`.
    """
    module, config = _configured(arguments, "inspect")
    if not callable(getattr(module, "step", None)):
        raise ValueError(
            f"recipe {arguments[0]} defines no function step(config), which returns a compiled model and a batch"
        )
    return module.step(config)


def batches(arguments: Sequence[str]) -> Any:
    """Reads a recipe's training data, without training.

    Args:
        arguments: the recipe, then its options.

    Returns:
        The batches that the recipe's function `batches` returns; None where it has no such function.
    """
    module, config = _configured(arguments, "audit")
    return module.batches(config) if callable(getattr(module, "batches", None)) else None


def _configured(arguments: Sequence[str], command: str) -> tuple[ModuleType, Any]:
    recipe, *options = arguments
    module = find(recipe)
    config = getattr(module, Path(recipe).stem)()
    return module, parse(config, options, f"keras-mp {command} {recipe}", module.__doc__ or "")


def main(arguments: Sequence[str]) -> int:
    """Runs a recipe from the command line.

    Args:
        arguments: the recipe, then its options: `["digits", "--epochs", "3"]`.

    Returns:
        The exit status: 0, 1 for a mistake of the user's (told in a line; set KERAS_MP_TRACEBACK to see where), 130
        after ctrl-C.
    """
    # absl writes pages about folders before the first line of ours.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m recipes RECIPE [--help] [--option value ...]\n\nrecipes:")
        for name, text in recipes().items():
            print(f"  {name:<20} {text}")
        print("  path/to/recipe.py    a file of yours, with a function of its own name and train(config)")
        return 0
    try:
        import_keras()
        recipe = find(arguments[0])
        name = Path(arguments[0]).stem
        config = getattr(recipe, name)()
        config = parse(config, arguments[1:], f"python -m recipes {arguments[0]}", recipe.__doc__ or "")
        with _together(config, arguments[0]):
            return 130 if recipe.train(config).interrupted else 0
    except KeyboardInterrupt:
        print("stopped at once: only the finished files of the run are kept", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError, LostWorkerError, DisagreementError) as error:
        if os.environ.get("KERAS_MP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _together(config: Any, recipe: str) -> AbstractContextManager[None]:
    """Joins the processes that train together, where there are any; before TensorFlow or JAX compute anything."""
    from keras_mp.parallel.workers import join  # not above, because it imports Keras

    cluster = find_cluster(getattr(config, "hosts", None), getattr(config, "host_index", None))
    settings = {name: value for name, value in vars(config).items() if name not in ("hosts", "host_index", "output")}
    return join(cluster, {"recipe": recipe, **settings})
