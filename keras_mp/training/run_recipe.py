"""Where a training recipe is, in a file, in a module, or in the folder `recipes`; and how it is run."""

import ast
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_mp.parallel.cluster import find_cluster
from keras_mp.parallel.coordinator import LostWorkerError
from keras_mp.system.one_of import did_you_mean
from keras_mp.system.quiet_import import import_keras
from keras_mp.training.training_recipe import WHAT, TrainingRecipe

FOLDER = Path("recipes")
PROGRAM = "keras-mp train"
WHERE = "keras-mp's own are in the folder recipes/ of its repository, and are run from a clone of it"


def find_recipe(given: str, folder: Path | None = None) -> TrainingRecipe:
    """Finds a training recipe and imports it.

    Args:
        given: the path of its file, `"mine/wide.py"`; or `"module:function"`, where `function` returns the config and
            `train` is in the same module (the path of a file may stand for the module); or a bare name, `"digits"`,
            for the file `digits.py` of `folder`.
        folder: the folder in which bare names are looked up; by default `recipes` in the current folder.

    Returns:
        The training recipe.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no training recipe of that name, or the file is none; says what is right.
        ModuleNotFoundError: there is no such module.
    """
    folder = FOLDER if folder is None else folder
    place, colon, function = given.rpartition(":")
    if given.endswith(".py"):
        return TrainingRecipe(given, import_file(_existing(Path(given))), Path(given).stem)
    if colon:
        if not place or not function:
            raise ValueError(f"training recipe {given!r} must have a name on both sides of the colon: module:function")
        return TrainingRecipe(given, _module(place, given), function)
    path = folder / f"{given}.py"
    if not path.is_file():
        raise ValueError(_unknown(given, folder))
    return TrainingRecipe(given, import_file(path), given)


def find_model_function(given: str) -> Callable[..., Any] | None:
    """The function of `"module:function"` where the module defines no `train`: it builds a model, and is no recipe.

    Returns:
        The function; None for anything else that a user may give.

    Raises:
        FileNotFoundError, ModuleNotFoundError: there is no such file or module.
    """
    place, _, function = given.rpartition(":")
    if not place or not function or given.endswith(".py"):
        return None
    module = _module(place, given)
    build = getattr(module, function, None)
    return build if callable(build) and not hasattr(module, "train") else None


def recipes_in(folder: Path | None = None) -> dict[str, str]:
    """Lists the training recipes of a folder: each file that defines a function of its own name.

    A file that is no Python is left out: it says what is wrong with it when it is run.

    Returns:
        The first line of each one's docstring, by its name; empty where there is no such folder.
    """
    recipes = {}
    for path in sorted((FOLDER if folder is None else folder).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        if any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in tree.body):
            recipes[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return recipes


def import_file(path: Path) -> ModuleType:
    """Imports a Python file, as part of its package where it is in one.

    What lies beside it, or beside its package, can be imported by it.
    """
    path = path.resolve()
    name, root = module_name(path)
    if str(root) not in (os.path.realpath(folder) for folder in sys.path):
        sys.path.append(str(root))
    importlib.invalidate_caches()  # the file may be younger than what is known of its folder
    try:
        specification = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # another package of that name, or the program that runs
        specification = None
    if specification is not None and specification.origin and Path(specification.origin).resolve() == path:
        return importlib.import_module(name)
    return _import_by_place(path)


def module_name(path: Path) -> tuple[str, Path]:
    """The name of a file as a module, and the folder from which it is imported by that name."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    return ".".join(parts), root


def _import_by_place(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert specification is not None and specification.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(specification)
    # Dataclasses and Keras's serialization look a class's module up by its name.
    sys.modules[module.__name__] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _module(place: str, given: str) -> ModuleType:
    return import_file(_existing(Path(place))) if place.endswith(".py") else _import_module(place, given)


def _import_module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of something that the module imports
        raise ModuleNotFoundError(
            f"no training recipe {given!r}: there is no module {error.name!r}", name=name
        ) from None


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no training recipe {str(path)!r}: no such file. {WHAT}. {WHERE}")
    return path


def _unknown(given: str, folder: Path) -> str:
    known = list(recipes_in(folder))
    if known:
        return (
            f"unknown training recipe {given!r}.{did_you_mean(given, known)} Known: {', '.join(known)}; "
            "or the path of a .py file, or module:function"
        )
    return (
        f"unknown training recipe {given!r}: there is no file {str(folder.absolute() / given)}.py. {WHAT}. {WHERE}; "
        "your own is given as the path of its file, or as module:function"
    )


# Runs a training recipe with the command line it is given.


def run_recipe(arguments: Sequence[str], folder: Path | None = None) -> int:
    """Trains as a command line says.

    Args:
        arguments: the name of the training recipe, then its options: `["digits", "--epochs", "3"]`; none, or `--help`,
            lists them all.
        folder: the folder in which bare names are looked up; by default `recipes` in the current folder.

    Returns:
        The exit status: 0, 1 for a mistake of the user's (told in a line; set KERAS_MP_TRACEBACK to see where), 130
        after ctrl-C.
    """
    # absl writes pages about folders before the first line of ours.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(folder))
        return 0
    try:
        import_keras()
        recipe = find_recipe(arguments[0], folder)
        config = recipe.config(arguments[1:], f"{PROGRAM} {arguments[0]}")
        with _together(config, recipe):
            return 130 if recipe.train(config) else 0
    except KeyboardInterrupt:
        print("stopped at once: only the finished files of the run are kept", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError, LostWorkerError) as error:
        if os.environ.get("KERAS_MP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _help(folder: Path | None) -> str:
    recipes = recipes_in(folder)
    usage = f"usage: {PROGRAM} TRAINING_RECIPE [--help] [--option value ...]"
    lines = [usage, "", f"  {PROGRAM} digits --epochs 3", "", "training recipes:"]
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
