"""Checks of a model and of a batch that every function of this package makes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_mp.lean.chunked_head import ChunkedHead
from keras_mp.lean.chunked_loss import is_sparse_crossentropy
from keras_mp.rebuild.notes import original_class
from keras_mp.rebuild.walk import check_is_model


def check_model(model: Any) -> None:
    """Refuses what no step can be run on.

    Raises:
        TypeError: model is no Keras model.
        ValueError: it is not built, has no weights to train, or has no loss.
    """
    check_is_model(model)
    if not model.built:
        raise ValueError(f"model {model.name!r} is not built: call it once on a batch, or give it an Input")
    if not model.trainable_variables:
        raise ValueError(f"model {model.name!r} has no trainable weights, so there is no backward pass to look at")
    if not has_loss(model):
        custom = (
            " Its own train_step is not run: what is differentiated is compute_loss." if trains_itself(model) else ""
        )
        raise ValueError(
            f"model {model.name!r} has no loss: call compile(loss=...), or define compute_loss(x, y, y_pred, "
            f"sample_weight).{custom}"
        )


def has_loss(model: keras.Model) -> bool:
    """Whether `model.compute_loss` has something to compute."""
    own = type(model).compute_loss not in (keras.Model.compute_loss, ChunkedHead.compute_loss)
    return own or (bool(getattr(model, "compiled", False)) and getattr(model, "_compile_loss", None) is not None)


def trains_itself(model: keras.Model) -> bool:
    """Whether the class of a model has its own `train_step`."""
    return original_class(model).train_step is not keras.Model.train_step


def check_labels(model: keras.Model, batch: tuple) -> None:
    """Refuses classes that a sparse loss does not have: TensorFlow tells late, and JAX not at all.

    Raises:
        ValueError: y is missing, or holds a class that the model's output has no place for.
    """
    _, y, _ = batch
    if type(model).compute_loss not in (keras.Model.compute_loss, ChunkedHead.compute_loss):
        return
    if y is None:
        raise ValueError(f"data has no labels: the loss of model {model.name!r} needs batches (x, y)")
    loss = getattr(model, "loss", None)
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if not is_sparse_crossentropy(loss) or len(outputs) != 1 or len(keras.tree.flatten(y)) != 1:
        return
    classes, labels = outputs[0].shape[-1], np.asarray(keras.tree.flatten(y)[0])
    if (ignored := getattr(loss, "ignore_class", None)) is not None:
        labels = labels[labels != ignored]
    if classes and not ((labels >= 0) & (labels < classes)).all():
        raise ValueError(
            f"labels from {labels.min():g} to {labels.max():g} do not fit the loss {loss!r}: model {model.name!r} puts "
            f"out {classes} classes, so labels are 0 to {classes - 1}"
        )
