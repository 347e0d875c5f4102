"""Parts that whole models leave in the dark: found by mutants that no test killed."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.rebuild.quantized_policies import group_count
from keras_mp.stability.quantized_product import keeps_float_inputs


def test_dropout_of_attention_is_there_in_training_alone():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8, 16))
    layer = keras.layers.MultiHeadAttention(2, 8, dropout=0.5)
    model = keras_mp.stabilize(keras.Model(inputs, layer(inputs, inputs)))
    x = np.random.default_rng().normal(size=(2, 8, 16))

    def outputs(training):
        return [keras.ops.convert_to_numpy(keras.ops.cast(model(x, training=training), "float32")) for _ in range(2)]

    np.testing.assert_array_equal(*outputs(False))
    assert np.mean(np.not_equal(*outputs(True))) > 0.5


def test_softmax_as_an_activation_is_rounded_once():
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(512, "softmax", use_bias=False)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    logits = np.random.default_rng().uniform(-1, 1, (1, 512)).astype("float16")
    layer.set_weights([logits])
    exact = np.exp(logits.astype("float64")) / np.exp(logits.astype("float64")).sum()

    def error():
        return np.max(np.abs(keras.ops.convert_to_numpy(layer(np.ones((1, 1)))) / exact - 1))

    assert error() > 2.0**-10.9
    keras_mp.stabilize(model)
    assert error() <= 2.0**-10.9


class PlacingNorm(keras.layers.Layer):
    """Returns its inputs in another size, and the places of the largest of them."""

    def call(self, inputs):
        return inputs / 8, keras.ops.argmax(inputs, axis=-1)


def test_integers_come_out_of_a_normalization_as_they_are():
    keras.config.set_dtype_policy("mixed_bfloat16")
    layer = PlacingNorm()
    inner = keras.Input((16,))
    model = keras.Model(inner, keras.layers.Dense(4)(layer(inner)[0]))
    keras_mp.stabilize(model)
    scaled, places = layer(np.eye(16, dtype="float32"))
    assert keras.backend.standardize_dtype(scaled.dtype) == "bfloat16"
    assert "int" in keras.backend.standardize_dtype(places.dtype)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(places), np.arange(16))


@pytest.mark.parametrize(
    "mode, quantizer, floats", [("int4", None, True), ("int4", "any", False), ("int8", None, False)]
)
def test_only_int4_without_a_quantizer_of_inputs_keeps_them(mode, quantizer, floats):
    assert keeps_float_inputs(SimpleNamespace(quantization_mode=mode, inputs_quantizer=quantizer)) is floats


@pytest.mark.parametrize(
    "size, mode, groups", [(4, "int4", 3), (10, "int4", 1), (-1, "int4", 0), (None, "int4", 0), (4, "int8", 0)]
)
def test_groups_are_counted_with_the_last_that_is_not_full(size, mode, groups):
    layer = SimpleNamespace(quantization_mode=mode, _int4_block_size=size, g_idx=np.zeros(10))
    assert group_count(layer) == groups
