"""A step as Keras makes it, and why one fails."""

from __future__ import annotations

import importlib.util
import linecache
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.conversion.to_float32 import computes_in_float32, in_float32
from keras_mp.numerics.nonfinite_origin import Frame
from keras_mp.rebuild.walk import compute_dtypes
from keras_mp.reporting.text import error_line
from keras_mp.stability.sensitive import sensitive_layers

engine = backend.engine_of(__package__)


def given_of(batch: tuple) -> tuple:
    """The parts of `(x, y, sample_weight)` that are given."""
    return tuple(part for part in batch if part is not None)


def loss_of(model: keras.Model, given: tuple) -> Any:
    """Loss of a batch in float32, as Keras's train_step."""
    x, y, sample_weight = (*given, None, None)[:3]
    training = {"training": True} if model._call_has_training_arg else {}
    y_pred = model(x, **training)
    # Private, as it is what Keras's own train_step calls: it knows older signatures of compute_loss.
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    return ops.cast(loss, "float32")


def explained(model: keras.Model, batch: tuple, error: Exception) -> ValueError:
    """Makes the error for a step, by whose fault."""
    leaves = [np.asarray(backend.values_of(leaf)) for leaf in keras.tree.flatten(batch) if leaf is not None]
    if any(leaf.dtype.kind in "USO" for leaf in leaves) and keras.backend.backend() != "tensorflow":
        return ValueError(
            f"data holds strings, which no step on {keras.backend.backend()} takes; plain Keras fails, too. Look the "
            "strings up before: batches of text_vectorization(strings), and a model without that layer; or use "
            "KERAS_BACKEND=tensorflow"
        )
    plain = _error_of(model, batch)
    if plain is None:
        return ValueError(
            f"plain Keras makes this step of model {model.name!r}, and keras_mp cannot trace it: {error_line(error)}"
        )
    fits_in_float32 = False
    if not computes_in_float32(model):
        with in_float32(model):
            fits_in_float32 = _error_of(model, batch) is None
    if fits_in_float32:
        dtypes = compute_dtypes(model) - {"float32"}
        way_out = "; keras_mp.stabilize(model) may mend it" if sensitive_layers(model) else ""
        return ValueError(
            f"model {model.name!r} cannot make a training step in {' and '.join(sorted(dtypes))}, though in float32 it "
            f"can on the same data{way_out}. It is not the data, for plain Keras fails, too: {error_line(plain)}"
        )
    x, y, _ = batch
    given = " and ".join(
        f"{name} of shape {', '.join(str(leaf.shape) for leaf in keras.tree.flatten(part) if leaf is not None)}"
        for name, part in (("x", x), ("y", y))
        if part is not None
    )
    outputs = [tuple(output.shape) for output in keras.tree.flatten(getattr(model, "outputs", None) or [])]
    takes = f", whose output has the shape {', '.join(map(str, outputs))}" if outputs else ""
    loss = getattr(model, "loss", None)
    return ValueError(
        f"data does not fit model {model.name!r}{takes}, or its loss {loss!r}: given {given}: {error_line(error)}"
    )


def _error_of(model: keras.Model, batch: tuple) -> Exception | None:
    """The error of a step that nothing observes, or None."""

    def forward(tap: Any, given: tuple) -> tuple[Any, list[Any]]:
        return loss_of(model, given), []

    step = engine.observed_step(model, forward, lambda loss, kept, gradients, tapped: (loss, gradients))
    try:
        step(given_of(batch))
    except engine.STEP_ERRORS as error:
        return error
    return None


# Whose lines say how an operation is made, and not which layer asked for it.
_LIBRARIES = ("keras", "keras_mp", "jax", "jaxlib", "tensorflow", "numpy", "optree", "tree", "absl")


def described(name: str, frames: Sequence[Frame]) -> str:
    """Describes an operation of a user's code, or nothing.

    Args:
        frames: (file, line number) of the Python that led to it, the innermost first.
    """
    specs = (importlib.util.find_spec(library) for library in _LIBRARIES)
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    folders += [Path(sysconfig.get_path("stdlib"), name) for name in ("contextlib.py", "functools.py")]
    for file, line in frames:
        if file == __file__:  # what calls the model
            break
        if not any(Path(file).is_relative_to(folder) for folder in folders):
            return f"{name} in {Path(file).name}, line {line}: {linecache.getline(file, line).strip()}"
    return ""
