"""Loads a .keras file, makes up a batch, and names inputs."""

from __future__ import annotations

import importlib
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.lean.chunked_loss import is_sparse_crossentropy
from keras_mp.system.argument_checks import whole_number
from keras_mp.system.registration import register_classes


class ModelFileError(ValueError):
    """A file without a model that can be loaded."""


def load_model_file(
    path: str | os.PathLike[str], modules: Sequence[str] = (), *, unsafe: bool = False, compile: bool = True
) -> Any:
    """Loads a model.

    Args:
        path: a `.keras` file, written on any backend.
        modules: names of modules to import first: those that define the model's own layers and functions, registered
            or not.
        unsafe: whether to load Python lambdas, too, which can run any code: only for files you trust.
        compile: whether to compile the model, too, as it was when it was saved.

    Raises:
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
    """Refuses what is no `.keras` file, without loading anything."""
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
    """The cause, without the configs that Keras writes behind it."""
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


# A step of a model that is in a file: the batch is made from the shapes that the model knows.


def model_of_file(path: Path, modules: Sequence[str] = (), *, unsafe: bool = False) -> tuple[Any, bool]:
    """Loads a model, and tells whether it is compiled."""
    model = load_model_file(path, modules, unsafe=unsafe)
    return model, bool(model.compiled and model.optimizer is not None)


def step_of_file(
    path: Path, batch_size: int, length: int | None = None, modules: Sequence[str] = (), *, unsafe: bool = False
) -> tuple[Any, tuple[Any, Any], bool]:
    """Loads a model, and makes shapes of a batch.

    Args:
        batch_size, length: the sizes that the model leaves open, as for `shapes_of_step`.

    Returns:
        (model, (x, y), whether the model is compiled for training), as `shapes_of_step`.
    """
    whole_number("batch_size", batch_size)
    model, trains = model_of_file(path, modules, unsafe=unsafe)
    return model, shapes_of_step(model, batch_size, length, trains), trains


def shapes_of_step(
    model: keras.Model,
    batch_size: int,
    length: int | None,
    trains: bool,
    otherwise: str = "call keras_mp.inspect(model, batch) with one of yours",
) -> tuple[Any, Any]:
    """Makes the shapes of a batch for a model.

    Args:
        batch_size: the number of samples.
        length: the size of each other axis that the model leaves open, such as the tokens of a text; None where it
            leaves none.
        trains: whether the model is compiled for training.
        otherwise: words for the message that say what to do where the shapes are not known.

    Returns:
        (x, y). Targets of a sparse loss are integers without the last axis of the outputs; others are shaped as the
        outputs.
    """
    whole_number("batch_size", batch_size)
    if length is not None:
        whole_number("length", length)
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"the inputs of model {model.name!r} are not known from its file, so no batch can be made up: {otherwise}"
        )

    still_open = [tensor for tensor in model.inputs if None in tensor.shape[1:]]
    if still_open and length is None:
        first = still_open[0]
        raise ValueError(
            f"input {first.name!r} of model {model.name!r} has the shape {tuple(first.shape)}, which leaves more open "
            f"than the batch, so no batch can be made up: give the size with --length, or {otherwise}"
        )
    if length is not None and not still_open:
        raise ValueError(f"--length is for a model that leaves sizes open: all of model {model.name!r} are fixed")

    def filled(shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return batch_size, *(length if size is None else size for size in shape[1:])

    # A Sequential that was loaded has no `input`; others may have one that is a dict.
    alone = isinstance(model, keras.Sequential)
    inputs, outputs = (model.inputs[0], model.outputs[0]) if alone else (model.input, model.output)
    x = keras.tree.map_structure(lambda tensor: keras.KerasTensor(filled(tensor.shape), tensor.dtype), inputs)
    losses = keras.tree.flatten(model.loss) if trains else []
    sparse = any(
        is_sparse_crossentropy(loss) or "sparse" in str(getattr(loss, "name", loss)).lower() for loss in losses
    )

    def target(output: Any) -> Any:
        shape = filled(output.shape)
        return keras.KerasTensor(shape[:-1], "int32") if sparse else keras.KerasTensor(shape, "float32")

    return x, keras.tree.map_structure(target, outputs)


# How a model's inputs are called by those who give them.


def input_names(structure: Any) -> list[str]:
    """Names the inputs of a functional or sequential model, flattened.

    It is the key of the dict that one is in, else the name of its InputLayer. Keras calls the tensor itself
    "keras_tensor" where `keras.Input` was given no name.
    """
    leaves = keras.tree.flatten_with_path(structure)
    keys = [next((key for key in reversed(path) if isinstance(key, str)), None) for path, _ in leaves]
    tensors = [tensor for _, tensor in leaves]
    # Private, as there is no public way from a symbolic tensor to the layer that made it.
    histories = [getattr(tensor, "_keras_history", None) for tensor in tensors]
    layers = [past.operation.name if past else x.name for past, x in zip(histories, tensors, strict=True)]
    names = [key if key is not None and keys.count(key) == 1 else name for key, name in zip(keys, layers, strict=True)]
    return names if len(set(names)) == len(names) else [tensor.name for tensor in tensors]
