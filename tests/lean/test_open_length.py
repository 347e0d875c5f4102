"""Lean attention where neither the batch nor the length is known when a step is traced."""

import keras
import numpy as np

import keras_mp

VOCABULARY = 60


def build():
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 16, mask_zero=True)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


def test_batches_of_several_lengths_train_as_without():
    rng = np.random.default_rng()
    batches = []
    for length in (8, 12, 1):
        tokens = rng.integers(1, VOCABULARY, (4, length + 1))
        tokens[0, length // 2 + 1 :] = 0  # padded
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    weights = None
    losses = []
    for treat in (lambda model: model, keras_mp.lean.make_lean):
        model = treat(build())
        weights = weights or model.get_weights()
        model.set_weights(weights)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses.append([model.train_on_batch(*batch) for batch in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
