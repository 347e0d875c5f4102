"""The same model in another precision."""

import keras
import numpy as np
import pytest

import keras_mp


def test_the_same_model_in_another_precision():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(8, "gelu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, "softmax", name="head")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    low = keras_mp.export.in_precision(model, "mixed_bfloat16")
    assert (low.get_layer("hidden").compute_dtype, low.get_layer("head").compute_dtype) == ("bfloat16", "float32")
    assert model.get_layer("hidden").compute_dtype == "float32" and low.compiled
    for one, other in zip(model.get_weights(), low.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    back = keras_mp.export.in_precision(low, "float32")
    assert {layer.compute_dtype for layer in back.layers} == {"float32"}
    assert keras_mp.export.in_precision(low, "mixed_bfloat16") is low
    with pytest.raises(ValueError, match="precision='bf16' must be one of 'float32'"):
        keras_mp.export.in_precision(model, "bf16")
