"""Compares an export with its model, where that proves something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.conversion.model_file import input_names
from keras_mp.rebuild.compared import arrays_of
from keras_mp.rebuild.compared import relative_difference as relative_difference
from keras_mp.rebuild.walk import inputs_of as inputs_of
from keras_mp.reporting.text import error_line

# How a report says that the model could not be run as it was, in its own precision.
NO_ORIGINAL = "the original cannot be run here in its own precision, to compare with"


class ExportError(ValueError):
    """A model that cannot be exported in float32."""


def check_batch(batch: Any, structure: Any = None, argument: str = "verify") -> None:
    """Refuses a batch that is none of the model's inputs.

    Args:
        batch: any structure of arrays, batch first.
        structure: the structure of the model's inputs, of things that have a shape and a name, as a KerasTensor or a
            TensorSpec has. An input whose batch has a size of its own there may have that. None where it is not known.
    """
    arrays = [np.asarray(x) for x in keras.tree.flatten(batch)]
    names = [f"array {index}" for index in range(len(arrays))]
    # Of a batch that the model gives an input, such as 1 for what is added to each record.
    own_sizes: dict[str, int] = {}
    if structure is not None:
        try:
            keras.tree.assert_same_structure(structure, batch)
        except (TypeError, ValueError) as error:
            raise ExportError(
                f"{argument} must have the structure of the model's inputs, with the shapes {_shapes(structure)}, and "
                f"has {_shapes(batch)}"
            ) from error
        tensors = keras.tree.flatten(structure)
        names = [f"input {name!r}" for name in input_names(structure)]
        own_sizes = {name: tensor.shape[0] for tensor, name in zip(tensors, names, strict=True)}
        for tensor, name, array in zip(tensors, names, arrays, strict=True):
            right = (None, *tuple(tensor.shape)[1:])
            if len(right) != array.ndim or any(s not in (None, n) for s, n in zip(right, array.shape, strict=True)):
                raise ExportError(f"{argument} has the shape {array.shape} for {name}, which takes {right}")
    counts = {name: len(array) if array.ndim else 0 for name, array in zip(names, arrays, strict=True)}
    shared = {count for name, count in counts.items() if count != own_sizes.get(name)}
    if len(shared) > 1 or 0 in counts.values() or not counts:
        told = ", ".join(f"{count} for {name}" for name, count in list(counts.items())[:5]) or "none"
        raise ExportError(f"{argument} must hold as many records, 1 or more, for each input, and holds {told}")


def _shapes(structure: Any) -> Any:
    """The shapes in place of the arrays in a structure."""
    return keras.tree.map_structure(lambda x: tuple(x.shape) if hasattr(x, "shape") else np.shape(x), structure)


def agreement(
    name: str, actual: Any, expected: Any, batch: Any, model: keras.Model, tolerance: float, hint: str = ""
) -> tuple[float, list[str]]:
    """Compares an export's outputs with the float32 model's.

    Args:
        model: the model in float32; its weights are looked at where its outputs are not numbers.
        tolerance: the largest difference allowed, as `relative_difference` has it.
        hint: a text that is added to the message where the difference is larger.

    Returns:
        (The difference, sentences on what could not be compared.)

    Raises:
        ExportError: the difference is larger; or there is NaN, or no finite value, in an output of the model, with
            which nothing can agree.
    """
    outputs = [x for x in arrays_of(expected) if x.dtype.kind != "O"]
    nan = sum(int(np.isnan(x).sum()) for x in outputs)
    infinite = sum(int(np.isinf(x).sum()) for x in outputs)
    total = sum(x.size for x in outputs)
    if nan or any(x.size and not np.isfinite(x).any() for x in outputs):
        raise ExportError(
            f"{name} cannot be verified: {nan + infinite:,} of the {total:,} values that the model in float32 gives "
            f"for the batch given as verify are NaN or infinite, and cannot be compared{_cause(batch, model)}"
        )
    difference = relative_difference(actual, expected)
    if not difference <= tolerance:
        raise ExportError(
            f"{name} differs from the model run in float32 by {difference:.2e} on the batch given as verify, more "
            f"than tolerance={tolerance:.0e}{hint}"
        )
    if not infinite:
        return difference, []
    note = f"{infinite:,} of the {total:,} values are infinite in both, and could not be compared"
    return difference, [note]


def _cause(batch: Any, model: keras.Model) -> str:
    floats = [x for x in map(np.asarray, keras.tree.flatten(batch)) if x.dtype.kind == "f"]
    if not all(np.isfinite(x).all() for x in floats):
        return ": the batch itself holds NaN or infinity"
    bad = [
        weight.path
        for weight in model.weights
        if keras.backend.is_float_dtype(weight.dtype) and not np.isfinite(keras.ops.convert_to_numpy(weight)).all()
    ]
    if not bad:
        return ": give a batch like those that the model was trained on"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f": NaN or infinity is in the weights {', '.join(bad[:3])}{more}. Load a checkpoint in which they are finite"


def computed(model: keras.Model, batch: Any) -> Any:
    """Runs a model as TensorFlow's graph; eager mode rounds otherwise."""
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    if keras.backend.backend() != "tensorflow":
        return model(inputs, training=False)
    import tensorflow as tf

    # A concrete function: an export calls several models, and TensorFlow would warn of retracing.
    function = tf.function(lambda x: model(x, training=False), autograph=False)
    return function.get_concrete_function(inputs)(inputs)


def differences(
    name: str,
    actual: Any,
    model: keras.Model,
    float32: keras.Model,
    batch: Any,
    tolerance: float,
    before: Sequence[str] = (),
    hint: str = "",
) -> dict[str, Any]:
    """Compares an export with the model in both precisions.

    Args:
        name, actual, batch, tolerance, hint: the arguments of `agreement`.
        before: notes that come first.

    Returns:
        The fields max_difference, precision_gap and notes of its report.
    """
    # What computed in float32 throughout must not be compared with less, as this device may have it.
    with backend.full_float32():
        expected = computed(float32, batch)
    difference, notes = agreement(name, actual, expected, batch, float32, tolerance, hint)
    try:
        gap = relative_difference(actual, computed(model, batch))
    except Exception as error:  # the model runs in float32: its own precision has no kernel, or no room, here
        gap, notes = None, [*notes, f"{NO_ORIGINAL}: {error_line(error)}"]
    return {"max_difference": difference, "precision_gap": gap, "notes": tuple(dict.fromkeys([*before, *notes]))}
