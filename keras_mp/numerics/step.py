"""A training step's loss, and what to say where the step cannot be run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.conversion.reference import computes_in_float32, in_float32
from keras_mp.rebuild.model import RebuildError, layers_by_path


def loss_of(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
    """The loss of a batch as Keras's own train_step computes it, in float32."""
    training = {"training": True} if model._call_has_training_arg else {}
    y_pred = model(x, **training)
    # Private, as it is what Keras's own train_step calls: it knows older signatures of compute_loss.
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    return ops.cast(loss, "float32")


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Puts back what the steps within change: moving statistics, seeds, metrics."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [keras.ops.copy(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def step_failed(model: Any, batch: tuple, error: Exception) -> ValueError:
    """The error for a step that could not be run: whether the data, the precision or the look at it is at fault.

    Args:
        model: the model.
        batch: `(x, y, sample_weight)`.
        error: what the step raised.
    """
    if _has_strings(batch) and keras.backend.backend() != "tensorflow":
        return ValueError(
            f"data holds strings, which no step on {keras.backend.backend()} takes; plain Keras fails alike. Look the "
            "strings up before: batches of text_vectorization(strings), and a model without that layer; or use "
            "KERAS_BACKEND=tensorflow"
        )
    plain = _error_of_plain_step(model, batch)
    if plain is None:
        return ValueError(
            f"model {model.name!r} trains on this batch, and cannot be looked at while it does: {_first_line(error)}"
        )
    if _runs_in_float32(model, batch):
        low = sorted({layer.compute_dtype for layer in [model, *layers_by_path(model).values()]} - {"float32"})
        return ValueError(
            f"model {model.name!r} does not train in {' and '.join(low)} on this device and backend, and does in "
            f"float32 on the same data. Plain Keras fails alike: {_first_line(plain)}"
        )
    return _does_not_fit(model, batch, error)


def _has_strings(batch: tuple) -> bool:
    leaves = (leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    return any(np.asarray(leaf).dtype.kind in "USO" for leaf in leaves)


def _error_of_plain_step(model: Any, batch: tuple) -> Exception | None:
    """What a step raises in which nothing but the loss and the gradients is computed."""

    def forward(tap: Any, given: Any) -> tuple[Any, list[Any]]:
        return loss_of(model, *(*given, None, None)[:3]), []

    step = backend.observed_step(model, forward, lambda loss, kept, gradients, tapped: loss)
    try:
        with unchanged(model):
            step(tuple(part for part in batch if part is not None))
    except backend.step_errors() as error:
        return error
    return None


def _runs_in_float32(model: Any, batch: tuple) -> bool:
    if computes_in_float32(model):
        return False
    try:
        return _error_of_plain_step(in_float32(model, batch[0]), batch) is None
    except RebuildError:
        return False


def _first_line(error: Exception) -> str:
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):  # Keras's frame around the cause
        lines = [f"{lines[0].removeprefix('Exception encountered when calling ').rstrip('.')}: {lines[1]}"]
    return f"{type(error).__name__}: {lines[0][:500] if lines else ''}"


def _does_not_fit(model: Any, batch: tuple, error: Exception) -> ValueError:
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
        f"data does not fit model {model.name!r}{takes}, or its loss {loss!r}: given {given}: {_first_line(error)}"
    )
