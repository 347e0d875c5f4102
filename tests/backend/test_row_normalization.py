"""Jitted programs inside a graph that is not jitted: where there are some, and what they compute."""

import keras
import numpy as np
import pytest
from jitted_programs import jitted
from keras import layers

import keras_mp
from keras_mp import backend

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX has no graph that is not jitted", allow_module_level=True)

import tensorflow as tf
from twins import twin

KINDS = {
    "layer": {},
    "layer, no gamma": {"scale": False},
    "layer, no beta": {"center": False},
    "layer, neither": {"scale": False, "center": False},
    "rms": None,
}
UNIT = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}  # half a unit in the last place of 1


def normalization(kind, policy, features):
    """A stabilized layer with random weights."""
    settings = KINDS[kind]
    make = layers.RMSNormalization if settings is None else layers.LayerNormalization
    layer = make(dtype=policy, **(settings or {}))
    model = keras.Sequential([keras.Input((features,)), layer, layers.Dense(1, dtype=policy)])
    layer = keras_mp.stabilize(twin(model)).layers[0]
    rng = np.random.default_rng()
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    return layer


def step_of(layer, spec):
    """A traced function from (x, gradient of y) to y and the gradients of x and of the weights."""

    @tf.function(input_signature=[spec, spec], autograph=False)
    def step(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, [x, *(weight.value for weight in layer.weights)], upstream)

    return step


def run(layer, x, upstream, spec=None):
    """What `step_of` returns, in float64."""
    step = step_of(layer, spec or tf.TensorSpec((None, *x.shape[1:]), x.dtype))
    return tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64).numpy(), step(x, upstream))


def reference(x, gamma, beta, epsilon, upstream, centered):
    """y, and the gradients of x, gamma and beta, in float64."""
    c = x - x.mean(-1, keepdims=True) if centered else x
    r = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + epsilon)
    h, g = c * r, upstream * gamma
    to_x = r * (g - (g.mean(-1, keepdims=True) if centered else 0) - h * (g * h).mean(-1, keepdims=True))
    axes = tuple(range(x.ndim - 1))
    return gamma * h + beta, to_x, (upstream * h).sum(axes), upstream.sum(axes)


# Each kind and each shape, and both policies.
@pytest.mark.parametrize(
    "shape, kind, policy",
    [
        ((301, 33), "layer", "mixed_float16"),
        ((1, 5), "layer", "mixed_bfloat16"),
        ((7, 1), "layer, no gamma", "mixed_bfloat16"),
        ((3, 4, 9), "layer, no beta", "mixed_float16"),
        ((2, 3, 5, 16), "layer, neither", "mixed_bfloat16"),
        ((301, 33), "rms", "mixed_bfloat16"),
        ((2, 3, 5, 16), "rms", "mixed_float16"),
        ((7, 1), "rms", "mixed_float16"),
    ],
    ids=str,
)
def test_normalization_and_its_gradients_beside_float64(shape, kind, policy):
    layer = normalization(kind, policy, shape[-1])
    dtype = keras.DTypePolicy(policy).compute_dtype
    rng = np.random.default_rng()
    x, upstream = (tf.cast(rng.normal(3.0, 2.0, shape), dtype) for _ in range(2))
    assert len(jitted(step_of(layer, tf.TensorSpec((None, *shape[1:]), dtype)))) == 2
    y, (to_x, *to_weights) = run(layer, x, upstream)
    assert layer(x).dtype == dtype
    weights = {weight.name: weight.numpy().astype("float64") for weight in layer.weights}
    gamma, beta = weights.get("gamma", weights.get("scale", 1.0)), weights.get("beta", 0.0)
    wide = (tf.cast(tensor, tf.float64).numpy() for tensor in (x, upstream))
    x, upstream = wide
    expected_y, expected_x, to_gamma, to_beta = reference(x, gamma, beta, layer.epsilon, upstream, kind != "rms")
    low = UNIT[policy]
    np.testing.assert_allclose(y, expected_y, rtol=low + 1e-5, atol=1e-5 * np.abs(gamma).max())
    # A row of few features may have next to no variance, by which a rounding of the mean is divided.
    spread = 1 / np.sqrt(x.var(-1).min() + layer.epsilon) if kind != "rms" else 1.0
    np.testing.assert_allclose(to_x, expected_x, rtol=low + 1e-4, atol=1e-5 * max(spread, 1.0) ** 3)
    expected = [to_gamma] * ("gamma" in weights or "scale" in weights) + [to_beta] * ("beta" in weights)
    for value, right in zip(to_weights, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5 * x.size * max(spread, 1.0))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_rows_of_one_value_are_as_keras_has_them(kind):
    layer = normalization(kind, "mixed_bfloat16", 8)
    spec = tf.TensorSpec((None, 8), tf.bfloat16)
    own = step_of(layer, spec).get_concrete_function()
    with backend.without_islands():
        keras_own = step_of(layer, spec).get_concrete_function()
    for value in (0.0, 1e-30, 6e4, np.inf, np.nan):
        x = np.random.default_rng().normal(size=(5, 8)).astype("float32")
        x[2] = value
        x, upstream = tf.cast(x, tf.bfloat16), tf.ones((5, 8), tf.bfloat16)
        (y, to_all), (expected_y, expected) = (
            tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64).numpy(), step(x, upstream))
            for step in (own, keras_own)
        )
        others = [0, 1, 3, 4]
        np.testing.assert_allclose(y[others], expected_y[others], rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(np.isfinite(y[2]), np.isfinite(expected_y[2]))
        np.testing.assert_array_equal(np.isfinite(to_all[0][2]), np.isfinite(expected[0][2]))
        for mine, right in zip(to_all[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(right))


def test_an_empty_batch():
    layer = normalization("layer", "mixed_bfloat16", 4)
    empty = tf.zeros((0, 3, 4), tf.bfloat16)
    y, (to_x, to_gamma, to_beta) = run(layer, empty, empty)
    assert y.shape == to_x.shape == (0, 3, 4)
    np.testing.assert_array_equal([to_gamma, to_beta], np.zeros((2, 4)))


def test_layers_of_one_shape_share_their_programs():
    normalizations = [layers.LayerNormalization(dtype="mixed_bfloat16") for _ in range(4)]
    model = keras.Sequential([keras.Input((3, 8)), *normalizations, layers.Dense(1, dtype="mixed_bfloat16")])
    model = keras_mp.stabilize(model)

    @tf.function(input_signature=[tf.TensorSpec((None, 3, 8), tf.float32)], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    # The first gets float32, the others bfloat16.
    assert len(jitted(step)) == 4


SPEC = tf.TensorSpec((None, 8), tf.bfloat16)


def in_inference():
    return tf.function(normalization("layer", "mixed_bfloat16", 8), input_signature=[SPEC], autograph=False)


def with_unknown_length():
    return step_of(normalization("layer", "mixed_bfloat16", 8), tf.TensorSpec((None, None, 8), tf.bfloat16))


def over_another_axis():
    layer = layers.LayerNormalization((1, 2), dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((3, 8)), layer, layers.Dense(1, dtype="mixed_bfloat16")])
    return step_of(keras_mp.stabilize(model).layers[0], tf.TensorSpec((None, 3, 8), tf.bfloat16))


@pytest.mark.parametrize("function", [in_inference, with_unknown_length, over_another_axis])
def test_there_are_none(function):
    assert jitted(function()) == []


def test_a_step_that_is_jitted_as_a_whole_has_none_inside():
    step = step_of(normalization("layer", "mixed_bfloat16", 8), SPEC)
    assert len(jitted(tf.function(lambda x: step.python_function(x, x), [SPEC], jit_compile=True))) == 0
