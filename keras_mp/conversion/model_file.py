"""Load a .keras file, and say in a line why one does not load."""

from __future__ import annotations

import importlib
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.conversion.registration import register_classes


class ModelFileError(ValueError):
    """A file holds no model that can be loaded; the message names the cause and a remedy."""


def load_model_file(
    path: str | os.PathLike[str], modules: Sequence[str] = (), *, unsafe: bool = False, compile: bool = True
) -> Any:
    """Loads a model.

    Args:
        path: a `.keras` file, written on any backend.
        modules: names of modules to import first: those that define the model's own layers and functions, registered
            or not.
        unsafe: also load Python lambdas, which can run any code: only for files you trust.
        compile: whether also to compile it, as it was when it was saved.

    Returns:
        The model.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: there is no such module.
        ModelFileError: it is no `.keras` file, or names a class or a lambda that may not be loaded.
    """
    path = check_model_file(path)
    register_classes()
    custom_objects: dict[str, Any] = {}
    for name in modules:
        custom_objects |= {key: value for key, value in vars(_imported(name)).items() if callable(value)}
    try:
        return keras.saving.load_model(path, custom_objects=custom_objects, compile=compile, safe_mode=not unsafe)
    except Exception as error:  # whatever the code of a layer raises
        raise ModelFileError(f"{str(path)!r} does not load: {_cause(error, modules, unsafe)}") from error


def check_model_file(path: str | os.PathLike[str]) -> Path:
    """Refuses what is no `.keras` file, as `load_model_file` does, without loading anything."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    if path.name.endswith(".weights.h5"):
        raise ModelFileError(
            f"{str(path)!r} holds only weights: load them into their model, and give the .keras file that "
            "model.save('model.keras') writes"
        )
    if path.is_dir() or not zipfile.is_zipfile(path):
        kind = "a folder" if path.is_dir() else "not complete, or of another kind"
        raise ModelFileError(f"{str(path)!r} is not a .keras file but {kind}: write one with model.save('model.keras')")
    return path


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.endswith(".py") or os.sep in name:
            module = name.removesuffix(".py").strip("./").replace(os.sep, ".")
            raise ImportError(f"--import takes a module's name, not a file's: --import {module}") from error
        raise


def _cause(error: Exception, modules: Sequence[str], unsafe: bool) -> str:
    """The cause in a line: Keras writes the whole config of the layer behind it, once a level."""
    text = str(error)
    missing = re.search(r"Could not locate (class|function) '([^']*)'", text)
    missing = missing or re.search(r"Unknown (\w+): '?(\w+)'?", text)
    if missing is not None:
        imported = f", which {' and '.join(modules)} does not define" if modules else ""
        return (
            f"it holds the {missing[1]} {missing[2]!r}{imported}, not registered with Keras: name the module that "
            "defines it with --import MODULE"
        )
    if not unsafe and re.search("Python `?lambda", text):
        return "it holds a Python lambda, which can run any code: if you trust the file, pass --unsafe"
    cause = text.rpartition("Exception encountered: ")[2].partition("Full object config:")[0].strip()
    first = next((line.strip() for line in cause.splitlines() if line.strip()), type(error).__name__)
    return f"{first[:300]} (if the model has layers or functions of your own, name their module with --import MODULE)"
