"""The vocabulary of subclassed models: the loss comes from the head's input where `call` returns its logits."""

import keras
import numpy as np
import own_blocks
import pytest
from keras import layers, ops
from same_step import assert_same_step, compiled, lean_of, optimizer, step

from keras_mp.lean import chunked_head
from keras_mp.lean.lean_model import lean_parts
from keras_mp.rebuild.walk import Walk

VOCABULARY, LENGTH = own_blocks.VOCABULARY, own_blocks.LENGTH


@keras.saving.register_keras_serializable("test_called_head")
class Tied(keras.Model):
    """A language model whose head is its embedding; `kind` says what it makes of the logits."""

    def __init__(self, kind="logits", **arguments):
        super().__init__(**arguments)
        self.kind = kind
        self.embedding = layers.ReversibleEmbedding(VOCABULARY, 8)
        self.narrow, self.wide = layers.Dense(8), layers.Dense(16, activation="gelu")
        self.head = layers.Dense(VOCABULARY, activation="softmax" if kind == "probabilities" else None)

    def call(self, tokens, training=None):
        x = self.narrow(self.wide(self.embedding(tokens)))
        if self.kind == "logits":
            return self.embedding(x, reverse=True)
        logits = self.head(x)
        if self.kind == "divided":
            return logits / 2.0
        return {"logits": logits} if self.kind == "dict" else logits  # of a Dense layer: "dense"

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@keras.saving.register_keras_serializable("test_called_head")
class OwnLoss(Tied):
    """Adds to the loss in code of its own."""

    def compute_loss(self, *arguments, **named):
        return 2.0 * super().compute_loss(*arguments, **named)


def tied(kind="logits", cls=Tied):
    model = cls(kind)
    model(ops.zeros((1, LENGTH), "int32"))
    return model


def batch():
    generator = np.random.default_rng()
    tokens, targets = (generator.integers(0, VOCABULARY, (3, LENGTH)) for _ in range(2))
    return tokens, targets, generator.uniform(0.5, 1, targets.shape).astype("float32")


@pytest.fixture
def chunks(monkeypatch):
    """The losses that are computed in chunks."""
    losses = []
    make = chunked_head.ChunkedCrossEntropy.of_features
    monkeypatch.setattr(
        chunked_head.ChunkedCrossEntropy, "of_features", lambda *args, **named: losses.append(1) or make(*args, **named)
    )
    return losses


def head(model):
    rows = [row for row in lean_parts(Walk(model)) if row.kind == "head"]
    return rows[0] if rows else None


@pytest.mark.parametrize("kind", ["logits", pytest.param("dense", marks=pytest.mark.jax)])
def test_the_loss_of_a_subclassed_model_comes_from_the_input_of_its_head(kind, chunks):
    model = compiled(tied(kind), run_eagerly=own_blocks.EAGERLY and kind == "logits")
    lean = lean_of(model)
    assert head(lean).done and not head(model).done and not head(model).reason
    x, y, weights = batch()
    assert_same_step(step(lean, x, y, weights), step(model, x, y, weights))
    assert chunks
    # The same again: behind a step the weights differ in their last bits, and logits, in which terms cancel, by more.
    lean.set_weights(model.get_weights())
    evaluated = [m.test_on_batch(x, y, sample_weight=weights) for m in (lean, model)]
    np.testing.assert_allclose(evaluated[0][0], evaluated[1][0], rtol=1e-5)
    np.testing.assert_allclose(lean.predict_on_batch(x), model.predict_on_batch(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "cls", "reason"),
    [("probabilities", Tied, "its activation is softmax"), ("divided", Tied, None), ("dict", Tied, None),
     ("logits", OwnLoss, "OwnLoss has a compute_loss() of its own")],
)  # fmt: skip
def test_other_models_compute_their_loss_as_before(kind, cls, reason, chunks):
    model = tied(kind, cls)
    x, y, _ = batch()
    if kind == "dict":
        loss = {"logits": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        model.compile(optimizer(), loss, run_eagerly=own_blocks.EAGERLY)
        y = {"logits": y}
    else:
        compiled(model, run_eagerly=own_blocks.EAGERLY)
    lean = lean_of(model)
    row = head(lean)
    assert (row is None) if reason is None else (not row.done and reason in row.reason)
    assert_same_step(step(lean, x, y), step(model, x, y))
    assert not chunks


def test_a_loss_that_cannot_be_in_chunks_is_computed_as_before(chunks):
    model = tied()
    # Without metrics: those of an earlier compile() stay, in Keras too.
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    lean, plain = lean_of(model), tied()
    plain.set_weights(lean.get_weights())
    x, y, _ = batch()
    for each in (lean, plain):
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        each.compile(optimizer(), loss, run_eagerly=own_blocks.EAGERLY)
    one_hot = np.eye(VOCABULARY, dtype="float32")[y]
    assert_same_step(step(lean, x, one_hot), step(plain, x, one_hot))
    assert not chunks
