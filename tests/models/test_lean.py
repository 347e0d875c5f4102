"""The lean GPT beside the same model of Keras's own layers: loss and gradients."""

import keras
import numpy as np
import pytest

import keras_mp
from benchmarks.plain_models import plain_gpt
from models.gpt import gpt
from models.transformer import Size

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 2, 32, 4, 128, 140
AFTER, PER_LAYER = 2, 16  # the weights of the two embeddings, and of a block of Keras's layers


def fused(weights):
    """The plain model's arrays as the lean model has them: queries, keys and values in one."""
    result = list(weights[:AFTER])
    for layer in range(LAYERS):
        block = weights[AFTER + layer * PER_LAYER :][:PER_LAYER]
        query, query_b, key, key_b, value, value_b, output, output_b = block[2:10]
        kernel = np.concatenate([each.reshape(WIDTH, -1) for each in (query, key, value)], axis=1)
        bias = np.concatenate([each.reshape(-1) for each in (query_b, key_b, value_b)])
        result += [*block[:2], kernel, bias, output.reshape(-1, WIDTH), output_b, *block[10:]]
    return result + list(weights[AFTER + LAYERS * PER_LAYER :])


def step(model, loss, tokens, targets):
    """The loss, and the change of the weights at rate 1: minus the gradient."""
    before = [np.asarray(weight) for weight in model.get_weights()]
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=True)
    value = model.train_on_batch(tokens, targets)
    return float(value), [np.asarray(after) - b for after, b in zip(model.get_weights(), before, strict=True)]


def both(precision, remat, seed):
    generator = np.random.default_rng(seed)
    keras.config.set_dtype_policy(precision)
    plain = plain_gpt(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH)
    lean = gpt(Size(LAYERS, WIDTH, HEADS), VOCABULARY, LENGTH, remat=remat)
    plain.set_weights([generator.normal(size=w.shape) * 0.1 + ("gamma" in w.path) for w in plain.weights])
    lean.set_weights(fused(plain.get_weights()))
    tokens, targets = generator.integers(0, VOCABULARY, (2, 3, LENGTH))
    ours = step(lean, keras_mp.ChunkedCrossEntropy(rows=50), tokens, targets)
    value, changes = step(plain, keras.losses.SparseCategoricalCrossentropy(from_logits=True), tokens, targets)
    return ours, (value, fused(changes))


def distance(ours, exact):
    return np.sqrt(sum(np.square(a - b).sum() for a, b in zip(ours, exact, strict=True)))


@pytest.mark.parametrize("remat", [False, True])
def test_float32_to_1e_5(remat):
    (ours, changes), (plain, expected) = both("float32", remat, None)
    assert ours == pytest.approx(plain, rel=1e-5)
    for a, b in zip(changes, expected, strict=True):
        # A change is the difference of two weights, which below 2 are known to half of 2**-23 each.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-2) + 2**-23)


def test_bfloat16_is_no_farther_from_float32_than_the_plain_model():
    seed = int(np.random.default_rng().integers(2**31))
    _, (exact, exact_changes) = both("float32", False, seed)
    (ours, changes), (plain, plain_changes) = both("mixed_bfloat16", False, seed)
    assert ours == pytest.approx(exact, rel=2**-8)
    assert plain == pytest.approx(exact, rel=2**-8)
    assert distance(changes, exact_changes) < 1.1 * distance(plain_changes, exact_changes)
