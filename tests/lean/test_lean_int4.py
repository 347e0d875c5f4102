"""Lean int4 layers: the results and gradients of Keras's own, and no dequantized kernel kept between the passes."""

import adapted_models
import keras
import numpy as np
import pytest
from twins import twin

import keras_mp
from keras_mp.lean.lean_model import lean_parts
from keras_mp.rebuild.walk import Walk

JAX = keras.backend.backend() == "jax"
BATCH, ROWS, COLUMNS = 5, 24, 9
LAYERS = {
    "dense": lambda policy: keras.layers.Dense(COLUMNS, activation="tanh", dtype=policy),
    "einsum": lambda policy: keras.layers.EinsumDense("abc,cde->abde", (None, 3, COLUMNS // 3), dtype=policy),
    "einsum, two axes summed": lambda policy: keras.layers.EinsumDense(
        "abcd,cde->abe", (None, COLUMNS), bias_axes="e", dtype=policy
    ),
}
TOLERANCE = {"float32": 1e-6, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}


def group_config(size=8):
    return keras.quantizers.Int4QuantizationConfig(block_size=size)


def shape_of(kind):
    """Of a row of its inputs."""
    return (4, 6, 4) if kind == "einsum, two axes summed" else (4, ROWS)


def model_of(kind, policy, config=None, rank=3):
    """A model of an int4 layer."""
    layer = LAYERS[kind](policy)
    model = keras.Sequential([keras.Input(shape_of(kind), dtype="float32"), layer])
    adapted_models.adapt(layer, "int4", config or group_config(), rank)
    return model


def trained(model, x, y):
    """The loss of a step of SGD, and the gradients of what trains as its change."""
    before = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=JAX)
    loss = model.train_on_batch(x, y)
    after = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]
    return float(loss), [old - new for old, new in zip(before, after, strict=True)]


class Before(keras.layers.Layer):
    """Adds a weight, so that a gradient of the layer's input is needed."""

    def build(self, shape):
        self.weight = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        return x + self.weight


@pytest.mark.parametrize(
    "kind, policy",
    [
        ("dense", "float32"),
        ("einsum", "mixed_bfloat16"),
        pytest.param("einsum, two axes summed", "mixed_float16", marks=pytest.mark.jax),
    ],
)
def test_trains_as_the_plain_layer(kind, policy):
    rng = np.random.default_rng()
    layer = model_of(kind, policy).layers[-1]
    plain = keras.Sequential([keras.Input(shape_of(kind)), Before(dtype=policy), layer])
    lean = keras_mp.lean.make_lean(twin(plain))
    assert [(row.kind, row.done) for row in lean_parts(Walk(lean))] == [("int4", True)]
    x = rng.normal(size=(BATCH, *shape_of(kind))).astype("float32")
    y = rng.normal(size=plain(x).shape).astype("float32")
    (expected, gradients), (loss, ours) = trained(plain, x, y), trained(lean, x, y)
    tolerance = TOLERANCE[policy]
    assert loss == pytest.approx(expected, rel=tolerance)
    assert len(ours) >= 3 and all(np.abs(gradient).max() > 0 for gradient in gradients)
    for our, right in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(our, right, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize("rows", [1, 11])
def test_gradient_of_the_input_beside_float64(rows):
    rng = np.random.default_rng()
    layer = keras.layers.Dense(1 if rows == 1 else 5, use_bias=False, dtype="float32")
    layer.build((None, rows))
    layer.quantize("int4", config=group_config())
    kernel = keras.ops.convert_to_numpy(keras_mp.stability.quantized_product.dequantized_weights(layer, "float32"))
    plain = keras.Sequential([keras.Input((rows,)), Before(), layer])
    lean = keras_mp.lean.make_lean(twin(plain))
    x = rng.normal(size=(3, rows)).astype("float32")
    y = rng.normal(size=(3, kernel.shape[1])).astype("float32")
    _, (gradient,) = trained(lean, x, y)
    wide = kernel.astype("float64")
    expected = (2 / y.size * (x @ wide - y) @ wide.T).sum(0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.jax
@pytest.mark.skipif(not JAX, reason="one step of JAX is compiled for each")
def test_no_dequantized_kernel_is_kept():
    width, depth = 512, 3

    def temporary(lean):
        with keras_mp.set_global_policy("mixed_bfloat16"):
            layers = [keras.layers.Dense(width, use_bias=False) for _ in range(depth)]
            model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
            for layer in layers:
                adapted_models.adapt(layer, "int4", group_config(128), rank=2)
            model = keras_mp.lean.make_lean(model) if lean else model
            model.compile("sgd", "mse")
            batch = keras.KerasTensor((8, width), "float32"), keras.KerasTensor((8, 1), "float32")
            return keras_mp.inspect(model, batch, "h100").memory.temporary

    kernel = width * width  # in 8 bits
    assert temporary(lean=False) - temporary(lean=True) > (depth - 2) * kernel


def test_the_report_says_why_not():
    quantized_inputs = keras.quantizers.Int4QuantizationConfig(
        activation_quantizer=keras.quantizers.AbsMaxQuantizer(axis=-1), block_size=-1
    )
    for config, words in (
        (quantized_inputs, "its inputs are quantized"),
        (keras.quantizers.Int4QuantizationConfig(block_size=-1), "no groups"),
    ):
        (row,) = lean_parts(Walk(model_of("dense", "mixed_bfloat16", config)))
        assert not row.done and words in row.reason
    (row,) = lean_parts(Walk(keras_mp.stabilize(model_of("dense", "mixed_bfloat16"))))
    assert not row.done and "output" in row.reason
