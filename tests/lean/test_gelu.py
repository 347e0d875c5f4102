"""GELU against NumPy's float64: values and gradients, at zeros and at what overflows a square."""

import functools
import math

import keras
import numpy as np
import pytest
from gradients_of import MODES, value_and_gradients
from keras import ops

import keras_mp
from keras_mp.lean.gelu import Gelu, gelu
from keras_mp.lean.lean_layers import lean_gelu
from keras_mp.lean.lean_model import lean_parts
from keras_mp.rebuild.walk import Walk


def expected(x, approximate):
    x = x.astype("float64")
    if not approximate:
        below = 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
        return x * below, below + x * np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    with np.errstate(over="ignore"):
        return 0.5 * x * (1 + np.tanh(inner)), 0.5 * (1 + np.tanh(inner)) + 0.5 * x * slope / np.cosh(inner) ** 2


@pytest.mark.parametrize(
    "mode, dtype, approximate",
    [
        ("eager", "float32", True),
        (MODES[-2], "bfloat16", False),
        ("jit", "float32", False),
        pytest.param("jit", "bfloat16", True, marks=pytest.mark.jax),
    ],
)
def test_values_and_gradients(mode, dtype, approximate):
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    x = np.random.default_rng().normal(size=(3, 50)).astype("float32") * 3
    x = ops.convert_to_numpy(ops.cast(ops.cast(x, dtype), "float32"))
    y, slope = expected(x, approximate)

    def function(x):
        return ops.cast(gelu(ops.cast(x, dtype), approximate), "float32")

    # x multiplies the rounding of 1 + erf, of which nothing else is left where x is far below 0.
    assert np.all(np.abs(ops.convert_to_numpy(function(x)) - y) <= tolerance * (1 + np.abs(x)))
    _, found = value_and_gradients(lambda x: ops.sum(function(x)), [x], mode)
    # Below -4 the tanh is so near -1 that 1 + tanh is rounding, which x and the cubic multiply.
    terms = 1 + np.abs(x) * (1 + 3 * 0.044715 * x**2)
    assert np.all(np.abs(found - slope) <= tolerance * terms)


def test_zero_and_the_largest_numbers():
    x = np.array([0.0, -0.0, 1e4, -1e4, 1e15, -1e15], "float32")
    value, found = value_and_gradients(lambda x: ops.sum(gelu(x)), [x])
    np.testing.assert_allclose(ops.convert_to_numpy(gelu(x)), [0, 0, 1e4, 0, 1e15, 0])
    np.testing.assert_allclose(found, [0.5, 0.5, 1, 0, 1, 0])


class WithoutName:
    __hash__ = None

    def __call__(self, x):
        return 2 * x


def test_any_callable_is_an_activation():
    """A partial of GELU is GELU; a layer, an object and a function of one's own are none, and no error."""
    bound = functools.partial
    assert lean_gelu(bound(keras.activations.gelu, approximate=True)) is gelu
    assert lean_gelu(bound(bound(ops.gelu), approximate=False)) is lean_gelu(keras.activations.gelu)
    assert lean_gelu(bound(ops.gelu)) is gelu
    for other in (keras.layers.LeakyReLU(0.1), WithoutName(), lambda x: x, bound(keras.activations.elu, alpha=2.0)):
        assert lean_gelu(other) is None
        inputs = keras.Input((4, 8))
        hidden = keras.layers.Dense(8, "gelu")(keras.layers.Dense(8, activation=other)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(16, activation=other, name="head")(hidden))
        x = np.random.default_rng().normal(size=(2, 4, 8)).astype("float32")
        before = ops.convert_to_numpy(model(x))
        keras_mp.lean.make_lean(model)
        np.testing.assert_array_equal(ops.convert_to_numpy(model(x)), before)
        name = getattr(other, "__name__", "") or {"partial": "elu"}.get(type(other).__name__, type(other).__name__)
        reasons = [part.reason for part in lean_parts(Walk(model)) if part.kind == "head"]
        assert reasons == [f"its activation is {name}, so its result is not logits"]
        assert str(keras_mp.report(model))


def test_the_layer_is_lean_where_it_trains_and_keras_own_elsewhere(monkeypatch):
    """In inference an export is to hold plain operations."""
    called = []
    monkeypatch.setattr("keras_mp.lean.gelu.gelu", lambda x: called.append(x) or x)
    x = np.ones((2, 3), "float32")
    for training, times in ((None, 0), (False, 0), (True, 1)):
        Gelu()(x, training=training)
        assert len(called) == times
