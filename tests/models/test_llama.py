"""Llama against NumPy's float64, loss and gradients; its sizes against the published ones, and their checks."""

import keras
import llama_reference as reference
import numpy as np
import pytest
from shapes_alone import shapes_alone

import keras_mp
from keras_mp.fp8.selection import decide
from keras_mp.lowering import Source
from keras_mp.rebuild.walk import Walk
from models.llama import SIZES, LlamaSize, Scaling, frequencies, llama

TINY = LlamaSize(1, 128, 4, 2, 256, 100)
# The wavelengths of four pairs are 6, 35, 199 and 1118 tokens: one stays, one is mixed, two are long.
SMALL = LlamaSize(2, 16, 2, 1, 6, 7, theta=1000.0, scaling=Scaling(8.0, length=100))
RATE = 2.0**16  # of a step whose change is the gradient: so large that the weights before it do not round it


def step(size, remat=False):
    """The loss and the gradients of a model in float32, and of the reference."""
    rng = np.random.default_rng()
    model = llama(size, 5, remat)
    weights = [rng.normal(size=w.shape) * 0.3 + ("normalization" in w.path) for w in model.weights]
    weights = [array.astype("float32").astype("float64") for array in weights]
    model.set_weights(weights)
    tokens, targets = rng.integers(0, size.vocabulary, (2, 2, 5))
    model.compile(keras.optimizers.SGD(RATE), keras_mp.lean.ChunkedCrossEntropy(rows=4), jit_compile=True)
    loss = model.train_on_batch(tokens, targets)
    ours = [(w - np.asarray(after, "float64")) / RATE for w, after in zip(weights, model.get_weights(), strict=True)]
    theirs = [reference.gradient(weights, index, tokens, targets, size) for index in range(len(weights))]
    return (loss, ours), (reference.loss(weights, tokens, targets, size), theirs)


@pytest.mark.parametrize(
    "size, remat",
    [
        (SMALL._replace(layers=1), False),
        pytest.param(SMALL._replace(layers=1, tied=True, scaling=None, key_heads=2), True, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_numpy_in_float64(size, remat):
    (loss, gradients), (expected, exact) = step(size, remat)
    assert loss == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(gradients, exact, strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_logits_are_those_of_numpy_in_float64():
    rng = np.random.default_rng()
    model = llama(SMALL, 40)
    model.set_weights([rng.normal(size=w.shape) * 0.3 for w in model.weights])
    tokens = rng.integers(0, SMALL.vocabulary, (1, 40))
    exact = reference.logits([np.asarray(w, "float64") for w in model.get_weights()], tokens[0], SMALL)
    np.testing.assert_allclose(model.predict_on_batch(tokens)[0], exact, rtol=0, atol=1e-5 * np.abs(exact).max())


# The counts of the checkpoints' cards at Hugging Face.
@pytest.mark.parametrize("size, parameters", [("llama3-8b", 8_030_261_248), ("llama3.2-1b", 1_235_814_400)])
def test_parameters_are_those_published(size, parameters):
    with shapes_alone():
        model = Source(lambda: llama(size)).build()
    assert model.count_params() == parameters


@pytest.mark.parametrize("size", SIZES)
def test_frequencies_are_those_of_metas_rule(size):
    size = SIZES[size]
    exact = reference.frequencies(size.width // size.heads // 2, size.theta, size.scaling)
    np.testing.assert_allclose(frequencies(size), exact, rtol=1e-12)
    assert exact[0] == 1.0 and (size.scaling is None or exact[-1] == pytest.approx(5e5 ** (-31 / 32) / 32))


def test_fp8_converts_the_products_of_the_blocks():
    with shapes_alone():
        model = llama(SIZES["llama3.2-1b"]._replace(layers=1, vocabulary=128), 16)
    gains = {decision.path.removeprefix("llama/"): decision.float8 for decision in decide(Walk(model))}
    names = ["attention/query_key_value", "attention/output", "gate", "up", "down"]
    assert gains == {f"block1_{name}": True for name in names}
