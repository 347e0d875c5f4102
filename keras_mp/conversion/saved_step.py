"""A step of a model that is in a file: the batch is made from the shapes that the model knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from keras_mp.registration import register_classes


def model_of_file(path: Path) -> tuple[Any, bool]:
    """Loads a model, and tells whether it is compiled for training; raises a FileNotFoundError if there is no file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    register_classes()
    model = keras.saving.load_model(path)
    return model, bool(model.compiled and model.optimizer is not None)


def step_of_file(path: Path, batch_size: int) -> tuple[Any, tuple[Any, Any], bool]:
    """Loads a model, and makes the shapes of a batch for it.

    Args:
        path: a .keras file.
        batch_size: how many samples; other sizes are the model's.

    Returns:
        (model, (x, y), whether the model is compiled for training). Targets of a sparse loss are integers without the
        last axis of the outputs; others are shaped as the outputs.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the model has an input whose size it leaves open, or its inputs are not known.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    model, trains = model_of_file(path)
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"the inputs of model {model.name!r} are not known from its file: call keras_mp.inspect(model, batch)"
        )

    def sized(tensor: Any) -> Any:
        shape = (batch_size, *tensor.shape[1:])
        if None in shape:
            raise ValueError(
                f"input {tensor.name!r} of model {model.name!r} has the shape {tuple(tensor.shape)}, which leaves more "
                "open than the batch: call keras_mp.inspect(model, batch) with a batch of your own"
            )
        return keras.KerasTensor(shape, tensor.dtype)

    # A Sequential that was loaded has no `input`; others may have one that is a dict.
    alone = isinstance(model, keras.Sequential)
    inputs, outputs = (model.inputs[0], model.outputs[0]) if alone else (model.input, model.output)
    x = keras.tree.map_structure(sized, inputs)
    sparse = trains and "sparse" in str(getattr(model.loss, "name", model.loss)).lower()

    def target(output: Any) -> Any:
        shape = (batch_size, *output.shape[1:])
        return keras.KerasTensor(shape[:-1], "int32") if sparse else keras.KerasTensor(shape, "float32")

    return model, (x, keras.tree.map_structure(target, outputs)), trains
