"""Layers in 8 bits are Keras's with another product."""

import keras
import numpy as np
import pytest
from reference import compiled, normal, sqnr, to_numpy

from keras_mp.fp8 import Scalings, matmul
from keras_mp.layers import Float8Dense

RECIPE = Scalings.named("current", format="E4M3", scale="power_of_two")


def product_of(layer, x, dtype):
    """What the layer computes before bias and activation."""
    kernel = keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(layer.kernel))
    equation = getattr(layer, "equation", "")
    return matmul(keras.ops.cast(x, dtype), kernel, layer.scaling, equation=equation, dtype=dtype)


@pytest.mark.parametrize("dtype, jit", [("float32", False), ("mixed_bfloat16", True), ("mixed_float16", True)])
def test_dense(dtype, jit):
    layer = Float8Dense(8, "gelu", bias_initializer="uniform", scaling=RECIPE, dtype=dtype)
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


def test_the_kernel_is_rounded_once():
    """From float32 to FP8, not by way of bfloat16: 1.0625 + 2^-12 is nearer to 1.125, and 1.0625 is a tie to 1."""
    layer = Float8Dense(
        1, use_bias=False, scaling=Scalings.named("current", scale="power_of_two"), dtype="mixed_bfloat16"
    )
    layer.build((None, 2))
    layer.kernel.assign([[1.0625 + 2.0**-12], [1.75]])
    assert to_numpy(layer(np.array([[1.0, 0.0]], "float32"))).item() == 1.125
