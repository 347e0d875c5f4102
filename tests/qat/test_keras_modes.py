"""Layers that train with Keras's own int8 and int4 compute what the quantized ones do, bit for bit."""

import keras
import numpy as np
import pytest
from random_layers import config_of, model_of
from thirds import thirds

import keras_mp
from keras_mp.rebuild.walk import layers_by_path

MODES = {"int8": ("int8", None), "int4 by channel": ("int4", None), "int4 in blocks": ("int4", 16)}
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def bits(values):
    return [np.asarray(value).tobytes() for value in keras.tree.flatten(values)]


def predicted(model, batch):
    model.make_predict_function(force=True)
    return model.predict_on_batch(batch)


def layers_in(model, mode):
    return [layer for layer in layers_by_path(model).values() if layer.quantization_mode == mode]


def check_bits(count, policy, mode, block, jitted):
    layers, model, batch = model_of(count, np.random.default_rng(), policy)
    keras_mp.convert(model, config_of(mode, block))
    model.jit_compile = jitted
    before = predicted(model, batch)
    model.quantize(mode, config=config_of(mode, block))
    assert len(layers_in(model, mode)) == count
    after = predicted(model, batch)
    for layer, x, a, b in zip(layers, batch, bits(before), bits(after), strict=True):
        assert a == b, (layer.get_config(), x.shape)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("int8", "mixed_bfloat16"),
        ("int8", "mixed_float16"),
        ("int4 by channel", "float32"),
        ("int4 in blocks", "mixed_float16"),
    ],
)
def test_layers_compute_what_the_quantized_ones_do(mode, policy):
    if (mode, policy) == ("int8", "mixed_float16"):
        with pytest.raises(ValueError, match="float16"):
            check_bits(4, policy, *MODES[mode], jitted=False)
        return
    check_bits(8, policy, *MODES[mode], jitted=policy == "mixed_bfloat16")


@pytest.mark.jax
@pytest.mark.parametrize(
    "mode, block, policy",
    thirds(
        (mode, block, policy)
        for policy in POLICIES
        for mode, block in [("int8", None), ("int4", None), ("int4", 1), ("int4", 7), ("int4", 200)]
    ),
)
def test_two_hundred_random_layers(mode, block, policy):
    if (mode, policy) != ("int8", "mixed_float16"):
        check_bits(16, policy, mode, block, jitted=bool(np.random.default_rng().integers(2)))


def halfway(shape, mode, block, generator):
    """Weights halfway between two codes: where a compiler divides in another order, they get the other one."""
    largest = generator.uniform(0.1, 4, shape[-1]).astype("float32")
    if block is not None:
        return generator.choice([-1, 1], shape).astype("float32") * largest  # the zero point is halfway
    most = 127 if mode == "int8" else 7
    weights = (generator.integers(-most, most, shape) + 0.5).astype("float32") * (largest / most)
    weights[0] = largest
    return weights


@pytest.mark.jax
@pytest.mark.parametrize("mode", MODES)
def test_weights_halfway_between_codes(mode):
    mode, block = MODES[mode]
    dense, generator = keras.layers.Dense(200, use_bias=False), np.random.default_rng()
    model = keras.Sequential([keras.Input((64,)), dense])
    dense.kernel.assign(halfway((64, 200), mode, block, generator))
    keras_mp.convert(model, config_of(mode, block))
    model.compile(jit_compile=True)
    rows = np.eye(64, dtype="float32")
    trained = predicted(model, rows)
    model.quantize(mode, config=config_of(mode, block))
    np.testing.assert_array_equal(trained, predicted(model, rows))


def dequantized(kernel, mode, block):
    """The numbers that codes stand for, by the definitions that Keras's documentation has; float64."""
    kernel = kernel.astype("float64")
    if mode == "int8" or block is None:
        most = 127 if mode == "int8" else 7
        scale = most / (np.abs(kernel).max(0) + 1e-7)
        return np.clip(np.round(kernel * scale), -most - (mode == "int4"), most) / scale
    result = np.empty_like(kernel)
    for start in range(0, len(kernel), block):
        rows = kernel[start : start + block]
        padded = np.concatenate([rows, np.zeros((block - len(rows), rows.shape[1]))])
        scale = (padded.max(0) - padded.min(0) + 1e-7) / 15
        zero = np.clip(np.round(-padded.min(0) / scale) - 8, -8, 7)
        result[start : start + block] = (np.clip(np.round(rows / scale) + zero, -8, 7) - zero) * scale
    return result


def gradients(model, x, upstream):
    """Of `sum(upstream * outputs)` for the input and the weights."""
    x, upstream = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(upstream)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = keras.ops.sum(model(x) * upstream)
            return tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)])

        return [None if g is None else np.asarray(tf.convert_to_tensor(g)) for g in of(x)]
    import jax

    def loss(x, weights):
        return keras.ops.sum(model.stateless_call(weights, [], x)[0] * upstream)

    of_x, of_weights = jax.jit(jax.grad(loss, (0, 1)))(x, [v.value for v in model.trainable_variables])
    return [np.asarray(of_x), *map(np.asarray, of_weights)]


@pytest.mark.jax
@pytest.mark.parametrize("mode", MODES)
def test_gradients_go_straight_through(mode):
    mode, block = MODES[mode]
    r = np.random.default_rng()
    dense = keras.layers.Dense(9, "tanh")
    model = keras.Sequential([keras.Input((21,)), dense])
    x, upstream = r.normal(size=(6, 21)).astype("float32"), r.normal(size=(6, 9)).astype("float32")
    keras_mp.convert(model, config_of(mode, block))
    kernel = dequantized(np.asarray(dense.kernel), mode, block)
    outputs = np.asarray(model(x), "float64")
    of_product = upstream * (1 - outputs**2)  # at the outputs that are served, those of quantized inputs too
    of_x, of_kernel, of_bias = gradients(model, x, upstream)
    np.testing.assert_allclose(of_x, of_product @ kernel.T, rtol=2e-4, atol=2e-5)
    read = dequantized(x.T, "int8", None).T if mode == "int8" else x
    np.testing.assert_allclose(of_kernel, read.T @ of_product, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(of_bias, of_product.sum(0), rtol=2e-4, atol=2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_logits_and_rows_go_straight_through(tied):
    r = np.random.default_rng()
    table = keras.layers.ReversibleEmbedding(11, 10, tie_weights=tied, logit_soft_cap=2.0)
    x = keras.Input((10,))
    model = keras.Model(x, table(x, reverse=True))
    features, upstream = r.normal(size=(5, 10)).astype("float32"), r.normal(size=(5, 11)).astype("float32")
    keras_mp.convert(model, "qat_int8")
    weights = np.asarray(table.embeddings).T if tied else np.asarray(table.reverse_embeddings)
    of_logits = upstream * (1 - (np.asarray(model(features), "float64") / 2) ** 2)
    of_x, *of_weights = gradients(model, features, upstream)
    np.testing.assert_allclose(of_x, of_logits @ dequantized(weights, "int8", None).T, rtol=2e-4, atol=2e-5)
    expected = dequantized(features.T, "int8", None) @ of_logits
    np.testing.assert_allclose(of_weights[-1], expected.T if tied else expected, rtol=2e-4, atol=2e-5)

    rows = keras.layers.Embedding(7, 4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: keras.ops.cast(x, "int32")), rows])
    keras_mp.convert(model, "qat_int4")
    ids = r.integers(0, 7, (2, 3)).astype("float32")
    upstream = r.normal(size=(2, 3, 4)).astype("float32")
    of_rows = gradients(model, ids, upstream)[-1]
    expected = np.zeros((7, 4))
    np.add.at(expected, ids.astype(int).reshape(-1), upstream.reshape(-1, 4))
    np.testing.assert_allclose(of_rows, expected, rtol=1e-5, atol=1e-6)
