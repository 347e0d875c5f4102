"""Labels outside the classes are refused before a step, whichever sparse loss the model has."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.lean.chunked_loss import is_sparse_crossentropy
from keras_mp.numerics.data import check_labels

CLASSES = 7
SPARSE = keras.losses.SparseCategoricalCrossentropy


class OwnLoss(SPARSE):
    """A loss of a user, with a name of its own."""


def model_with(loss, lean=False):
    tokens = keras.Input((4,), dtype="int32")
    logits = keras.layers.Dense(CLASSES)(keras.layers.Embedding(CLASSES, 3)(tokens))
    model = keras.Model(tokens, logits)
    model.compile("sgd", loss)
    return keras_mp.lean.make_lean(model) if lean else model


def labels(*others):
    drawn = np.random.default_rng().integers(0, CLASSES, (2, 4))
    drawn.flat[: len(others)] = others
    return np.zeros((2, 4), "int32"), drawn, None


EVERY_LOSS = [
    pytest.param("sparse_categorical_crossentropy", False, id="name"),
    pytest.param(SPARSE(from_logits=True), False, id="Keras"),
    pytest.param(OwnLoss(from_logits=True, name="mine"), False, id="subclass"),
    pytest.param(keras_mp.lean.ChunkedCrossEntropy(), False, id="chunked"),
    pytest.param(keras_mp.lean.ChunkedCrossEntropy(), True, id="chunked in a lean model"),
]


@pytest.mark.parametrize("loss, lean", EVERY_LOSS)
@pytest.mark.parametrize("label", [-1, CLASSES])
def test_labels_that_are_no_class_are_refused(loss, lean, label):
    model = model_with(loss, lean)
    check_labels(model, labels(0, CLASSES - 1))
    with pytest.raises(
        ValueError, match=f"labels from .* do not fit the loss .*{CLASSES} classes, so labels are 0 to 6"
    ):
        check_labels(model, labels(label))


@pytest.mark.parametrize(
    "loss", [SPARSE(from_logits=True, ignore_class=-1), keras_mp.lean.ChunkedCrossEntropy(ignore_class=-1)]
)
def test_the_class_that_is_ignored_is_right_and_no_other(loss):
    model = model_with(loss, isinstance(loss, keras_mp.lean.ChunkedCrossEntropy))
    check_labels(model, labels(-1))
    check_labels(model, (None, np.full((2, 4), -1), None))
    with pytest.raises(ValueError, match="labels from .* do not fit"):
        check_labels(model, labels(-1, CLASSES))


def test_a_lean_model_without_labels_is_refused():
    with pytest.raises(ValueError, match="data has no labels"):
        check_labels(model_with(keras_mp.lean.ChunkedCrossEntropy(), True), (np.zeros((2, 4), "int32"), None, None))


def test_other_losses_are_not_judged():
    for loss in ("mse", keras.losses.CategoricalCrossentropy(), lambda y, y_pred: y):
        assert not is_sparse_crossentropy(loss)
    check_labels(model_with("mse"), labels(CLASSES))
