"""Wrong use of what looks into a model: each error says which argument is wrong, and what would be right."""

import keras
import numpy as np
import pytest
from faults import compiled, healthy
from keras import layers

import keras_mp
from keras_mp import audit
from keras_mp.numerics import find_nonfinite

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
UNBUILT = "is not built"


def dense(units, inputs=True):
    return keras.Sequential([*([keras.Input((8,))] if inputs else []), layers.Dense(units)])


def build(width=8, **arguments):
    return compiled(dense(width), **arguments)


# Functions of a healthy model, 16 rows of 8 features, and targets.
WRONG = [
    (lambda m, x, y: find_nonfinite("model", (x, y)), "model must be a keras.Model"),
    (lambda m, x, y: find_nonfinite(compiled(dense(1, False)), (x, y)), UNBUILT),
    (lambda m, x, y: find_nonfinite(m, (x[:0], y[:0])), "batch is empty"),
    (lambda m, x, y: find_nonfinite(m, (x, y[:3])), "different lengths"),
    (lambda m, x, y: find_nonfinite(m, (x[:, :5], y)), r"does not fit model .*x of shape \(16, 5\)"),
    (lambda m, x, y: find_nonfinite(m, (x, y), 0), "loss_scale=0 must be"),
    (lambda m, x, y: find_nonfinite(dense(1), (x, y)), "has no loss"),
    (lambda m, x, y: audit(compiled(dense(1, False)), (x, y)), UNBUILT),
    (lambda m, x, y: audit(m, []), "data is empty"),
    (lambda m, x, y: audit(m, x), "data is a ndarray"),
    (lambda m, x, y: audit(m, (x, y), steps=0), "steps=0"),
    (lambda m, x, y: audit(m, (x, y), sample=0), "sample=0"),
    (lambda m, x, y: audit(m, (x,)), "has no labels"),
    (lambda m, x, y: audit(m, (x, y)).suspects("float8"), "precision='float8'"),
    (lambda m, x, y: audit(build(loss="categorical_crossentropy"), (x, y.repeat(7, 1))), "does not fit model"),
    (
        lambda m, x, y: audit(compiled(dense(3), loss=LOGITS), (x, np.arange(16) % 8)),
        "labels from 0 to 7 do not fit.*3 classes, so labels are 0 to 2",
    ),
    *(
        (lambda m, x, y, most=most: keras_mp.NonFiniteFinder(max_consecutive_skips=most), "max_consecutive_skips=")
        for most in (0, 2.5, True)
    ),
]


@pytest.fixture(scope="module")
def given():
    keras.config.set_dtype_policy("float32")
    model, (x, y) = healthy()
    return model, x, y


@pytest.mark.parametrize("call, message", WRONG)
def test_it_is_named(call, message, given):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*given)
