"""Keras's TimeDistributed calls the layer in it in its own dtype: float32 is given to both."""

import keras
import numpy as np
import pytest
from arrays import numpy, rounded
from keras import layers
from zoo import normal

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers


def around(inner, *shape, policy="mixed_float16", wrapper=None, last=False):
    """A model that calls a layer for each step; with a layer after it, the layer's result is not the model's output."""
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input(shape)
    x = layers.TimeDistributed(inner(), name="steps", dtype=wrapper)(inputs)
    return keras.Model(inputs, x if last else layers.ReLU(negative_slope=1.0, dtype="float32")(x))


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pooled(x):
    return x.reshape(*x.shape[:2], 2, 1024, 1).mean(3)


INNER = {
    # 2,048 squares of about 300 add up to more than float16 holds, and so do 2,048 values.
    "UnitNormalization": (layers.UnitNormalization, (3, 2048), 300, unit),
    "Softmax": (layers.Softmax, (3, 2048), 3, softmax),
    "AveragePooling1D": (lambda: layers.AveragePooling1D(1024), (3, 2048, 1), 3000, pooled),
}


@pytest.mark.jax
@pytest.mark.parametrize("last", [False, True], ids=["inside", "output"])
@pytest.mark.parametrize("name", INNER)
def test_what_needs_float32_has_it_in_each_step(name, last):
    inner, shape, size, reference = INNER[name]
    model = around(inner, *shape, last=last)
    # Values that float16 holds, so that reading them loses nothing.
    x = (np.abs(normal(2, *shape)) * size).astype("float16").astype("float32")
    expected = reference(x.astype("float64"))
    assert {entry.path.split("/")[1] for entry in sensitive_layers(model)} == {"steps"}
    assert keras_mp.stabilize(model) is model and sensitive_layers(model) == []
    off = 2.0**-11 if not last else 1e-5
    np.testing.assert_allclose(numpy(model(x)), expected, rtol=2 * off, atol=1e-7)
    assert model.get_layer("steps").compute_dtype == "float32"
    keras_mp.revert(model)
    assert model.get_layer("steps").compute_dtype == model.get_layer("steps").layer.compute_dtype == "float16"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_output_is_not_rounded(policy, recwarn):
    """The product has 16-bit operands; bias and softmax are in float32."""
    model = around(lambda: layers.Dense(5, activation="softmax"), 3, 8, policy=policy, last=True)
    keras_mp.stabilize(model)
    assert not recwarn.list and sensitive_layers(model) == []
    x, low = normal(4, 3, 8), policy.removeprefix("mixed_")
    kernel, bias = model.get_weights()
    model.set_weights([kernel, bias + normal(5)])
    kernel, bias = (np.asarray(weight, "float64") for weight in model.get_weights())
    x_low, kernel_low = (rounded(value, low) for value in (x, kernel))
    assert keras.backend.standardize_dtype(model(x).dtype) == "float32"
    np.testing.assert_allclose(numpy(model(x)), softmax(x_low @ kernel_low + bias), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "inner",
    [
        lambda: layers.TimeDistributed(layers.Dense(5, activation="softmax")),
        lambda: keras.Sequential([keras.Input((3, 8)), layers.Dense(4), layers.Dense(5, activation="softmax")]),
        lambda: layers.Dense(5, dtype="float32"),
    ],
    ids=["steps of steps", "a model", "float32 by the user"],
)
def test_an_output_of_other_layers_is_not_rounded(inner, recwarn):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = around(inner, 2, 3, 8, policy="mixed_bfloat16", last=True)
    keras_mp.stabilize(model)
    assert not recwarn.list and sensitive_layers(model) == []
    assert keras.backend.standardize_dtype(model(normal(4, 2, 3, 8)).dtype) == "float32"


def test_a_layer_with_a_call_of_its_own_is_left_alone():
    class OwnSteps(layers.TimeDistributed):
        def call(self, inputs, training=None, mask=None):
            return self.layer(inputs)

    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((3, 8))
    steps = OwnSteps(layers.LayerNormalization())
    model = keras.Model(inputs, layers.Dense(2, dtype="float32")(steps(inputs)))
    keras_mp.stabilize(model)
    assert (steps.compute_dtype, steps.layer.compute_dtype) == ("bfloat16", "float32")
