"""Parts that whole models leave in the dark: found by mutants that no test killed."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.stability.quantized_product import group_count, keeps_float_inputs


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
