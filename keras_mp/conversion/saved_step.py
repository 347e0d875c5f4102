"""A step of a model that is in a file: the batch is made from the shapes that the model knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.conversion.model_file import load_model_file
from keras_mp.lean.sparse_loss import is_sparse_crossentropy
from keras_mp.system.whole_number import whole_number


def model_of_file(path: Path, modules: Sequence[str] = (), *, unsafe: bool = False) -> tuple[Any, bool]:
    """Loads a model as `load_model_file` does, and tells whether it is compiled for training."""
    model = load_model_file(path, modules, unsafe=unsafe)
    return model, bool(model.compiled and model.optimizer is not None)


def step_of_file(
    path: Path, batch_size: int, modules: Sequence[str] = (), *, unsafe: bool = False
) -> tuple[Any, tuple[Any, Any], bool]:
    """Loads a model, and makes the shapes of a batch for it.

    Args:
        path: a .keras file.
        batch_size: how many samples; other sizes are the model's.
        modules: as for `load_model_file`.
        unsafe: as for `load_model_file`.

    Returns:
        (model, (x, y), whether the model is compiled for training), as `shapes_of_step`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not load, has an input whose size it leaves open, or its inputs are not known.
    """
    whole_number("batch_size", batch_size)
    model, trains = model_of_file(path, modules, unsafe=unsafe)
    return model, shapes_of_step(model, batch_size, trains), trains


def shapes_of_step(
    model: keras.Model,
    batch_size: int,
    trains: bool,
    otherwise: str = "call keras_mp.inspect(model, batch) with one of yours",
) -> tuple[Any, Any]:
    """Makes the shapes of a batch for a model.

    Args:
        model: a model that is built.
        batch_size: how many samples; other sizes are the model's.
        trains: whether it is compiled for training.
        otherwise: what to do where the shapes are not known, for the message.

    Returns:
        (x, y). Targets of a sparse loss are integers without the last axis of the outputs; others are shaped as the
        outputs.

    Raises:
        ValueError: If the model has an input whose size it leaves open, or its inputs are not known.
    """
    whole_number("batch_size", batch_size)
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"the inputs of model {model.name!r} are not known from its file, so no batch can be made up: {otherwise}"
        )

    def sized(tensor: Any) -> Any:
        shape = (batch_size, *tensor.shape[1:])
        if None in shape:
            raise ValueError(
                f"input {tensor.name!r} of model {model.name!r} has the shape {tuple(tensor.shape)}, which leaves more "
                f"open than the batch, so no batch can be made up: {otherwise}"
            )
        return keras.KerasTensor(shape, tensor.dtype)

    # A Sequential that was loaded has no `input`; others may have one that is a dict.
    alone = isinstance(model, keras.Sequential)
    inputs, outputs = (model.inputs[0], model.outputs[0]) if alone else (model.input, model.output)
    x = keras.tree.map_structure(sized, inputs)
    losses = keras.tree.flatten(model.loss) if trains else []
    sparse = any(
        is_sparse_crossentropy(loss) or "sparse" in str(getattr(loss, "name", loss)).lower() for loss in losses
    )

    def target(output: Any) -> Any:
        shape = (batch_size, *output.shape[1:])
        return keras.KerasTensor(shape[:-1], "int32") if sparse else keras.KerasTensor(shape, "float32")

    return x, keras.tree.map_structure(target, outputs)
