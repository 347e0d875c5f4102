"""Float8Dense and Float8EinsumDense are Keras's layers with another product."""

import keras
import numpy as np
import pytest
from reference import compiled, sqnr, to_numpy

from keras_mp.fp8 import CurrentScaling, Float8Dense, Float8EinsumDense, matmul

RECIPE = CurrentScaling("E4M3", power_of_two=True)


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


def product_of(layer, x, dtype):
    """What the layer computes before bias and activation."""
    kernel = keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(layer.kernel))
    equation = getattr(layer, "equation", "")
    return matmul(keras.ops.cast(x, dtype), kernel, layer.recipe, equation=equation, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("jit", [False, True])
def test_dense(dtype, jit):
    layer = Float8Dense(8, "gelu", bias_initializer="uniform", recipe=RECIPE, dtype=dtype)
    x = normal(5, 3, 16)
    compute = layer.compute_dtype
    layer.build(x.shape)
    result = (compiled(layer) if jit else layer)(keras.ops.convert_to_tensor(x))
    assert keras.backend.standardize_dtype(result.dtype) == compute
    assert [weight.dtype for weight in layer.weights] == ["float32"] * 2
    expected = keras.activations.gelu(product_of(layer, x, compute) + keras.ops.cast(layer.bias, compute))
    # In jit the activation may skip a rounding to 16 bits.
    half_step = {"float32": 2.0**-22, "bfloat16": 2.0**-6, "float16": 2.0**-9}[compute]
    np.testing.assert_allclose(to_numpy(result), to_numpy(expected), rtol=half_step, atol=half_step)
    assert sqnr(product_of(layer, x, "float32"), x @ np.asarray(layer.kernel)) > 24


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_einsum_dense(dtype):
    layer = Float8EinsumDense("abc,cde->abde", (None, 2, 4), "relu", bias_axes="de", recipe=RECIPE, dtype=dtype)
    x = normal(5, 3, 16)
    result = layer(x)
    expected = keras.ops.relu(product_of(layer, x, layer.compute_dtype))  # the bias is zero
    np.testing.assert_array_equal(to_numpy(result), to_numpy(expected))
    assert result.shape == (5, 3, 2, 4)


def test_the_kernel_is_rounded_once():
    """From float32 to FP8, not by way of bfloat16: 1.0625 + 2^-12 is nearer to 1.125, and 1.0625 is a tie to 1."""
    layer = Float8Dense(1, use_bias=False, recipe=CurrentScaling(power_of_two=True), dtype="mixed_bfloat16")
    layer.build((None, 2))
    layer.kernel.assign([[1.0625 + 2.0**-12], [1.75]])
    assert to_numpy(layer(np.array([[1.0, 0.0]], "float32"))).item() == 1.125


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: Float8Dense(8, "relu", recipe=RECIPE, kernel_regularizer="l2", bias_constraint="non_neg"), (5, 16)),
        (lambda: Float8EinsumDense("...c,cd->...d", 8, recipe=RECIPE, kernel_constraint="unit_norm"), (5, 2, 16)),
    ],
)
def test_config_round_trip(layer, shape):
    layer = layer()
    x = normal(*shape)
    before = to_numpy(layer(x))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is type(layer) and again.recipe == RECIPE
    assert again.get_config() == layer.get_config()
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(to_numpy(again(x)), before)
    assert len(again.losses) == len(layer.losses)


def test_constraints_and_regularizers_are_kerass():
    layer = Float8Dense(8, kernel_regularizer=keras.regularizers.L2(0.5), kernel_constraint="unit_norm")
    model = keras.Sequential([keras.Input((16,)), layer])
    np.testing.assert_allclose(float(layer.losses[0]), 0.5 * np.sum(np.asarray(layer.kernel) ** 2), rtol=1e-5)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.train_on_batch(normal(4, 16), normal(4, 8))
    np.testing.assert_allclose(np.linalg.norm(np.asarray(layer.kernel), axis=0), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_lora(dtype):
    layer = Float8Dense(8, use_bias=False, dtype=dtype)
    x = normal(32, 16)
    model = keras.Sequential([keras.Input((16,)), layer])
    layer.enable_lora(4)
    assert sorted(weight.name for weight in layer.trainable_weights) == ["lora_kernel_a", "lora_kernel_b"]
    frozen = np.array(layer._kernel)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.train_on_batch(x, normal(32, 8))
    np.testing.assert_array_equal(np.array(layer._kernel), frozen)
    assert np.any(np.asarray(layer.lora_kernel_b))
    merged = frozen + np.asarray(layer.lora_kernel_a) @ np.asarray(layer.lora_kernel_b)
    assert sqnr(layer(x), x @ merged) > 26


def test_bad_input():
    with pytest.raises(ValueError, match="recipe='row' is unknown"):
        Float8Dense(8, recipe="row")
    with pytest.raises(ValueError, match="matrix products .* the label 'a' in 3 of its 3 terms"):
        Float8EinsumDense("abc,acd->abd", (None, 4))
    with pytest.raises(ValueError, match="units"):
        Float8Dense(0)
    layer = Float8Dense(8)
    layer.build((None, 16))
    with pytest.raises(TypeError, match="inputs must be floats, got int32"):
        layer(keras.ops.ones((2, 16), "int32"))
