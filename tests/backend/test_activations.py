"""Keras's GELU and SiLU as islands in a step on a CPU: beside float64, and where there are none."""

import math

import keras
import numpy as np
import pytest
from jitted_programs import jitted, step_scope, with_islands

import keras_mp
from keras_mp import backend

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX has no graph that is not jitted", allow_module_level=True)

import tensorflow as tf

UNIT = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float32": 1e-37, "bfloat16": 1e-37, "float16": 2.0**-25}  # XLA has no subnormals of float32
KINDS = {
    "by tanh": lambda x: keras.ops.gelu(x, approximate=True),
    "exact": lambda x: keras.ops.gelu(x, approximate=False),
    "silu": keras.ops.silu,
}


def step_of(kind, spec, scope=True, tape=True):
    """A traced function from (x, gradient of y) to y and the gradient of x."""

    @tf.function(input_signature=[spec, spec], autograph=False)
    def step(x, upstream):
        with step_scope() if scope else backend.without_islands():
            if not tape:
                return (KINDS[kind](x),)
            with tf.GradientTape() as recorded:
                recorded.watch(x)
                y = KINDS[kind](x)
            return y, recorded.gradient(y, x, upstream)

    return step


def exact(x, kind):
    """The function and its slope, in float64."""
    if kind == "silu":
        gate = 1 / (1 + np.exp(-np.clip(x, -700, 700)))
        return x * gate, gate * (1 + x * (1 - gate))
    if kind == "by tanh":
        tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return x / 2 * (1 + tanh), (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * inner
    normal = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * normal, normal + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", UNIT)
def test_beside_float64(dtype, kind):
    rng = np.random.default_rng()
    values = [0.0, -0.0, 1e-40, -1e-3, 0.5, 6.0, -6.0, 12.0, -12.0, 300.0, -300.0, 65504.0, -65504.0]
    x = tf.cast(np.concatenate([values, rng.normal(scale=2, size=99)]).reshape(-1, 8), dtype)
    upstream = tf.cast(rng.normal(size=x.shape), dtype)
    step = step_of(kind, tf.TensorSpec((None, 8), dtype))
    assert len(jitted(step)) == 2
    x, upstream, y, gradient = (tf.cast(each, tf.float64).numpy() for each in (x, upstream, *step(x, upstream)))
    exact_y, slope = exact(x, kind)
    # 1 + tanh and 1 + erf have the absolute error of 1 in float32, which x multiplies.
    assert np.all(np.abs(y - exact_y) <= UNIT[dtype] * np.abs(exact_y) + 2e-7 * np.abs(x) + SMALLEST[dtype])
    allowed = (UNIT[dtype] * np.abs(slope) + 5e-6) * np.abs(upstream) + SMALLEST[dtype]
    assert np.all(np.abs(gradient - slope * upstream) <= allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_so_after_it(kind):
    x, ones = tf.cast([[np.inf, -np.inf, np.nan]], tf.bfloat16), tf.ones((1, 3), tf.bfloat16)
    y, own = (step_of(kind, tf.TensorSpec((1, 3), tf.bfloat16), scope)(x, ones)[0] for scope in (True, False))
    np.testing.assert_array_equal(np.isfinite(tf.cast(y, tf.float32)), np.isfinite(tf.cast(own, tf.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_none_where_each_length_would_compile_or_nothing_is_differentiated(kind):
    known = tf.TensorSpec((None, 8), tf.bfloat16)
    assert not jitted(step_of(kind, tf.TensorSpec((None, None, 8), tf.bfloat16)))
    assert not jitted(step_of(kind, known, tape=False))
    assert not jitted(step_of(kind, known, scope=False))
    assert jitted(step_of(kind, known))


@pytest.mark.parametrize("islands", [True, False])
def test_a_prepared_model_has_it_in_layers_and_in_code_of_its_own(islands):
    class Own(keras.layers.Layer):
        def call(self, x):
            return keras.ops.gelu(x)

    network = [keras.layers.Dense(8, "gelu"), Own(), keras.layers.Dense(8, "silu"), keras.layers.Dense(1)]
    model = keras_mp.prepare(keras.Sequential([keras.Input((8,)), *network]), "sgd", "mse")
    batch = tf.ones((4, 8)), tf.ones((4, 1))
    with with_islands(islands):
        traced = tf.function(lambda: model.train_step(batch), autograph=False).get_concrete_function()
    # GELU exact and by tanh, and SiLU: a program forward and one backward for each.
    assert len([name for name in jitted(traced) if "forward" in name or "backward" in name]) == (6 if islands else 0)
