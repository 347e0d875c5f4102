"""make_lean on what people do with models: several outputs, weights, losses by name, metrics of their own, clones."""

import keras
import numpy as np
import own_blocks
import pytest
from keras import layers
from test_lean_families import recomputing
from test_make_lean import assert_same_step, changes, kinds

from keras_mp.lean.lean_model import lean_rows

pytestmark = pytest.mark.slow
WORDS, LENGTH, WIDTH = own_blocks.VOCABULARY, own_blocks.LENGTH, own_blocks.WIDTH
EVERY = {"attention", "gelu", "head", "block"}


def block():
    return own_blocks.TransformerBlock(rate=0.0)


def trunk(*blocks):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = own_blocks.Embeddings()(tokens)
    for each in blocks or (block(), block()):
        x = each(x)
    return tokens, x


def language_model(activation=None):
    tokens, x = trunk()
    return keras.Model(tokens, layers.Dense(WORDS, activation=activation)(x))


def probabilities():
    return language_model("softmax")


def two_outputs():
    tokens, x = trunk()
    side = layers.Dense(1, name="side")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, [layers.Dense(WORDS, name="words")(x), side])


def shared():
    first = block()
    tokens, x = trunk(first, block(), first)
    wide = layers.Dense(WIDTH, activation="gelu")
    return keras.Model(tokens, layers.Dense(WORDS)(wide(wide(x))))


@keras.saving.register_keras_serializable("test_lean_strangers")
def share_of_first(y_true, y_pred):
    """A metric of the user's own."""
    return keras.ops.mean(keras.ops.cast(keras.ops.argmax(y_pred, -1) == keras.ops.cast(y_true, "int32"), "float32"))


@keras.saving.register_keras_serializable("test_lean_strangers")
class LargestLogit(keras.metrics.Mean):
    """A metric of the user's own, as a class."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.max(y_pred, -1), sample_weight)


SPARSE = keras.losses.SparseCategoricalCrossentropy
# By name: the model, the arguments of compile besides the optimizer, and what is lean.
CASES = {
    "losses by name": (
        two_outputs, lambda: {"loss": {"words": SPARSE(from_logits=True), "side": "mse"},
                              "loss_weights": {"words": 0.5, "side": 2.0}}, EVERY - {"head"},
    ),
    "shared layers": (shared, lambda: {"loss": SPARSE(from_logits=True)}, EVERY),
    "a loss by name": (probabilities, lambda: {"loss": "sparse_categorical_crossentropy"}, EVERY - {"head"}),
    "a loss by name, of logits": (
        language_model, lambda: {"loss": "sparse_categorical_crossentropy"}, EVERY - {"head"},
    ),
    "a loss of probabilities": (probabilities, lambda: {"loss": SPARSE()}, EVERY - {"head"}),
    "metrics of the user": (
        language_model, lambda: {"loss": SPARSE(from_logits=True), "metrics": [share_of_first, LargestLogit(), "acc"]},
        EVERY,
    ),
    "weights of samples": (
        language_model, lambda: {"loss": SPARSE(from_logits=True), "weighted_metrics": ["acc"]}, EVERY,
    ),
}  # fmt: skip


def with_loss(model, **arguments):
    """Compiled to run eagerly, by default: to trace so small a model takes longer."""
    model.compile(keras.optimizers.SGD(1.0), **{"run_eagerly": own_blocks.EAGERLY, **arguments})
    return model


def batch(model):
    generator = np.random.default_rng()
    targets = [
        generator.integers(0, output.shape[-1], (4, *output.shape[1:-1]))
        if output.shape[-1] > 1
        else generator.normal(size=(4, 1)).astype("float32")
        for output in model.outputs
    ]
    return generator.integers(0, WORDS, (4, LENGTH)), targets if len(targets) > 1 else targets[0]


@pytest.mark.parametrize("name", CASES)
def test_it_makes_the_same_step(name):
    build, arguments, lean = CASES[name]
    model = with_loss(build(), **arguments())
    ours = recomputing(model)
    assert kinds(ours) == lean
    rows = lean_rows(ours)
    assert all(row.lean or row.reason for row in rows)
    x, y = batch(model)
    weights = np.random.default_rng().uniform(size=y.shape).astype("float32") if "weights" in name else None
    assert_same_step(changes(ours, x, y, weights), changes(model, x, y, weights))


@pytest.mark.parametrize("lean", [True, False])
def test_a_loss_that_is_given_afterwards(lean):
    """Compiled with a loss that cannot be chunked, then with one that can; and the other way."""
    model = language_model()
    one_hot = {"loss": keras.losses.CategoricalCrossentropy(from_logits=True)}
    first, second = one_hot, {"loss": SPARSE(from_logits=True)}
    if lean:
        first, second = second, first
    ours = recomputing(with_loss(model, **first))
    x, y = batch(model)
    for arguments in (first, second):
        targets = np.eye(WORDS, dtype="float32")[y] if arguments is one_hot else y
        plain = with_loss(language_model(), **arguments)
        plain.set_weights(ours.get_weights())
        assert_same_step(changes(with_loss(ours, **arguments), x, targets), changes(plain, x, targets))
