"""Layers in 8 bits are Keras's with another product; and layers of each recipe in one model."""

import keras
import numpy as np
import pytest
from reference import compiled, normal, sqnr, to_numpy
from twins import twin

import keras_mp
from keras_mp import revert
from keras_mp.fp8 import Scalings, matmul
from keras_mp.layers import Float8Dense, Float8EinsumDense

RECIPE = Scalings.named("current", format="E4M3", scale="power_of_two")
RECIPES = {
    "current": Scalings.named("current", scale="power_of_two"),
    "delayed": Scalings.named("delayed", history=4),
    "rowwise": Scalings.named("rowwise"),
    "mxfp8": Scalings.named("mxfp8", format={"gradient": "E5M2"}),
    "int8_current": Scalings.named("int8_current"),
}


@pytest.fixture(scope="module", params=["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """A model with a layer of each recipe, a batch, its file after some steps, and the loss of each step."""
    keras.config.set_dtype_policy(request.param)
    inputs = keras.Input((4, 40), name="inputs")
    results = []
    for name, recipe in RECIPES.items():
        if len(results) % 2:
            layer = Float8Dense(32, scaling=recipe, name=name)
        else:
            layer = Float8EinsumDense("abc,cde->abde", (None, 2, 16), scaling=recipe, name=name)
        results.append(keras.layers.Reshape((4, 32), name=f"{name}_result")(layer(inputs)))
    model = keras.Model(inputs, keras.layers.Concatenate(name="all")(results), name="recipes")
    # In TensorFlow's eager mode, a tenth of the time of the compiler's.
    eager = request.param == "mixed_bfloat16" and keras.backend.backend() == "tensorflow"
    scale = [] if request.param == "mixed_float16" else [keras_mp.LossScale.none()]
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.01), *scale), "mse", run_eagerly=eager)
    x, y = normal(16, 4, 40), normal(16, 4, 32 * len(RECIPES))
    losses = [float(model.train_on_batch(x, y)) for _ in range(6)]
    path = tmp_path_factory.mktemp("trained") / "model.keras"
    model.save(path)
    return model, x, path, losses


@pytest.mark.jax
def test_layers_of_every_recipe_train_save_load_and_revert(trained):
    model, x, path, losses = trained
    assert losses[-1] < losses[0]
    expected = model.predict_on_batch(x).astype("float64")
    loaded = keras.models.load_model(path, compile=False)
    assert {name: loaded.get_layer(name).scaling for name in RECIPES} == RECIPES
    for old, new in zip(model.trainable_weights, loaded.trainable_weights, strict=True):
        if "amax_history" not in old.path:  # what is loaded lies in the slot of the first call
            np.testing.assert_array_equal(to_numpy(old), to_numpy(new))
    np.testing.assert_array_equal(loaded.predict_on_batch(x), expected)
    plain = revert(twin(loaded))
    assert {type(plain.get_layer(name)) for name in RECIPES} == {keras.layers.Dense, keras.layers.EinsumDense}
    exact = plain.predict_on_batch(x).astype("float64")
    for place, name in enumerate(RECIPES):
        own = slice(32 * place, 32 * place + 32)
        most = 0.02 if name.startswith("int8") else 0.06
        distance = np.linalg.norm(expected[..., own] - exact[..., own])
        assert 0 < distance < most * np.linalg.norm(exact[..., own]), name


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
