"""The same model in another precision."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.conversion.to_float32 import in_float32, merged_float32


class MakesALayer(keras.layers.Layer):
    def call(self, x):
        return keras.layers.Rescaling(1 / 3)(x)


class Thirds(keras.layers.Layer):
    def call(self, x):
        return x * (1 / 3)


class MakesOneOfItsOwn(keras.layers.Layer):
    def call(self, x):
        return Thirds()(x)


@pytest.mark.jax
@pytest.mark.parametrize("makes_one", [MakesALayer, MakesOneOfItsOwn])
def test_layers_that_a_call_makes_have_the_precision_of_the_model(makes_one):
    """They would take the global policy, as those do that KerasHub's DeepLab and Flux make."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, makes_one()(keras.layers.Dense(8)(inputs)))
    x = np.random.default_rng().normal(size=(16, 8)).astype("float32")
    exact = x.astype("float64") @ np.asarray(model.layers[1].kernel, "float64") / 3

    def error(model):
        return np.abs(np.asarray(keras.ops.cast(model(x), "float32")) - exact).max() / np.abs(exact).max()

    assert error(model) > 1e-3
    assert error(keras_mp.export.in_precision(model, "float32")) < 1e-6
    assert error(merged_float32(model)) < 1e-6  # of which an export is made
    with in_float32(model):
        assert error(model) < 1e-6
    assert error(model) > 1e-3 and keras.config.dtype_policy().name == "mixed_bfloat16"


def test_the_same_model_in_another_precision():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(8, "gelu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, "softmax", name="head")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    low = keras_mp.export.in_precision(model, "mixed_bfloat16")
    assert (low.get_layer("hidden").compute_dtype, low.get_layer("head").compute_dtype) == ("bfloat16", "float32")
    assert model.get_layer("hidden").compute_dtype == "float32" and low.compiled
    np.testing.assert_equal(low.get_weights(), model.get_weights())
    back = keras_mp.export.in_precision(low, "float32")
    assert {layer.compute_dtype for layer in back.layers} == {"float32"}
    assert keras_mp.export.in_precision(low, "mixed_bfloat16") is low
    with pytest.raises(ValueError, match="precision='bf16' must be one of 'float32'"):
        keras_mp.export.in_precision(model, "bf16")


def test_activations_that_are_lambdas_come_into_another_precision():
    """Keras writes a lambda as bytecode, which it does not read as an activation."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    own = keras.layers.Dense(8, activation=lambda x: keras.ops.maximum(x, 0.1 * x))
    model = keras_mp.stabilize(keras.Sequential([keras.Input((8,)), own, keras.layers.Dense(3)]))
    x = np.random.default_rng().normal(size=(4, 8)).astype("float32")
    new = keras_mp.export.in_precision(model, "float32")
    np.testing.assert_allclose(new.predict(x, verbose=0), model.predict(x, verbose=0), atol=0.05)
