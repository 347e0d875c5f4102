"""A stabilized BatchNormalization beside NumPy's float64 and beside Keras's own."""

import keras
import numpy as np
import pytest
from gradients_of import MODES, value_and_gradients
from keras import ops
from twins import twin

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # half a unit in the last place of 1


def stabilized(policy, shape, **arguments):
    """The layer, taken out of a stabilized model, with random weights."""
    layer = keras.layers.BatchNormalization(dtype=policy, momentum=0.75, **arguments)
    model = keras.Sequential([keras.Input(shape[1:]), layer, keras.layers.Dense(1, dtype=policy)])
    layer = keras_mp.stabilize(twin(model)).layers[0]
    rng = np.random.default_rng()
    for weight in layer.trainable_weights:
        weight.assign(rng.normal(size=weight.shape))
    return layer


def reference(x, gamma, beta, epsilon, dy):
    """The outputs, the gradients of x, gamma and beta, mean and variance."""
    axes = tuple(range(x.ndim - 1))
    mean, variance = x.mean(axes), x.var(axes)
    rstd = 1 / np.sqrt(variance + epsilon)
    h = (x - mean) * rstd
    dh = dy * gamma
    dx = rstd * (dh - dh.mean(axes) - h * (dh * h).mean(axes))
    return gamma * h + beta, dx, (dy * h).sum(axes), dy.sum(axes), mean, variance


def draw(shape, policy):
    """Values that the precision has, in float32, about 3; and what the gradient of the outputs shall be."""
    rng = np.random.default_rng()
    dtype = keras.DTypePolicy(policy).compute_dtype
    x = ops.cast(ops.cast(rng.normal(3.0, 2.0, shape), dtype), "float32")
    return np.asarray(ops.convert_to_numpy(x)), rng.normal(size=shape).astype("float32"), dtype


@pytest.mark.parametrize(
    "shape, policy, mode",
    [
        pytest.param((9, 5), "mixed_bfloat16", "jit", marks=pytest.mark.jax),
        ((4, 7, 3), "mixed_float16", MODES[-2]),
        ((4, 6, 5, 8), "mixed_bfloat16", MODES[-2]),
        ((4, 6, 5, 8), "mixed_float16", "eager"),
        pytest.param((2, 3, 4, 3, 2), "mixed_float16", "jit", marks=pytest.mark.jax),
        ((1, 1, 6, 1), "mixed_bfloat16", "eager"),
    ],
)
def test_values_gradients_and_moving_statistics(shape, policy, mode):
    layer = stabilized(policy, shape)
    x, dy, dtype = draw(shape, policy)

    def weighted_sum(x, gamma, beta):
        mapping = [(layer.gamma, gamma), (layer.beta, beta)]
        with keras.StatelessScope(state_mapping=mapping):
            return ops.sum(ops.cast(layer(ops.cast(x, dtype), training=True), "float32") * dy)

    gamma, beta = (np.asarray(ops.convert_to_numpy(weight.value)) for weight in (layer.gamma, layer.beta))
    value, *gradients = value_and_gradients(weighted_sum, [x, gamma, beta], mode)
    outputs = layer(ops.cast(x, dtype), training=True)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    outputs, *expected, mean, variance = reference(*(a.astype("float64") for a in (x, gamma, beta)), 1e-3, dy)
    low = UNIT[dtype]
    count = x.size / shape[-1]
    rounded = low * np.abs(outputs * dy).sum()
    assert abs(value - (outputs * dy).sum()) <= rounded + 1e-4 * count
    # The gradient of the outputs, and that of x, are rounded to 16 bits. Sums of n of them are off by n roundings.
    size = np.abs(gamma) / np.sqrt(variance + 1e-3)
    np.testing.assert_allclose(gradients[0], expected[0], rtol=4 * low, atol=16 * low * size.max())
    np.testing.assert_allclose(gradients[1], expected[1], rtol=1e-3, atol=4 * low * count)
    np.testing.assert_allclose(gradients[2], expected[2], rtol=1e-3, atol=4 * low * count)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.75 + 0.25 * variance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "arguments, training",
    [
        ({"scale": False}, True),
        ({"center": False}, False),
        ({"scale": False, "center": False}, True),
        ({"trainable": False}, True),
        ({"axis": 1}, True),
        ({"axis": 3}, False),
        ({"epsilon": 1e-7}, True),
        pytest.param({"synchronized": True}, True, marks=pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's")),
    ],
)
def test_every_setting_as_keras(arguments, training):
    shape = (4, 5, 6, 3)
    ours = stabilized("mixed_bfloat16", shape, **arguments)
    plain = keras.layers.BatchNormalization(dtype="float32", momentum=0.75, **arguments)
    plain.build(shape)
    plain.set_weights(ours.get_weights())
    x, _, dtype = draw(shape, "mixed_bfloat16")
    expected = np.asarray(ops.convert_to_numpy(plain(x, training=training)))
    actual = ops.convert_to_numpy(ops.cast(ours(ops.cast(x, dtype), training=training), "float32"))
    np.testing.assert_allclose(actual, expected, rtol=2 * UNIT["bfloat16"], atol=1e-5)
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Frozen(keras.layers.BatchNormalization):
    """A subclass that computes otherwise."""

    def call(self, inputs, training=None):
        return ops.relu(super().call(inputs, training=False))


def test_a_subclass_computes_as_it_says():
    model = keras.Sequential([keras.Input((4, 3)), Frozen(dtype="mixed_bfloat16"), keras.layers.Dense(1)])
    layer = keras_mp.stabilize(twin(model)).layers[0]
    x, _, dtype = draw((2, 4, 3), "mixed_bfloat16")
    outputs = ops.convert_to_numpy(ops.cast(layer(ops.cast(x, dtype), training=True), "float32"))
    np.testing.assert_allclose(outputs, np.maximum(x, 0) / np.sqrt(1 + 1e-3), rtol=2 * UNIT["bfloat16"])
    np.testing.assert_array_equal(layer.moving_mean.numpy(), 0.0)


class Hidden(keras.layers.Layer):
    """Builds a layer under its own, wholly 16-bit policy."""

    def build(self, shape):
        self.inside = keras.layers.BatchNormalization(dtype=self.dtype_policy, name="inside")
        self.inside.build(shape)

    def call(self, inputs, training=None):
        return self.inside(inputs, training=training)


@pytest.mark.jax
def test_weights_that_are_16_bits_themselves():
    model = keras.Sequential([keras.Input((3,)), Hidden(dtype="bfloat16"), keras.layers.Dense(1)])
    model = keras_mp.stabilize(model)
    assert np.isfinite(ops.convert_to_numpy(model(draw((6, 3), "mixed_bfloat16")[0], training=True))).all()


def test_a_mask_leaves_rows_out():
    shape = (4, 5, 3)
    ours = stabilized("mixed_bfloat16", shape)
    x, _, dtype = draw(shape, "mixed_bfloat16")
    mask = np.arange(20).reshape(4, 5) % 3 > 0
    ours(ops.cast(np.where(mask[..., None], x, 1000.0), dtype), training=True, mask=mask)
    np.testing.assert_allclose(ours.moving_mean.numpy(), 0.25 * x[mask].astype("float64").mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.jax
def test_the_ends_of_float16():
    ours = stabilized("mixed_float16", (4, 8), scale=False, center=False)
    x = np.array(
        [[0.0, 65504.0, -65504.0, 6e-8, 1.0, 60000.0, np.inf, np.nan]] * 3 + [[0.0, -65504.0, -65504.0, 0, 1, 0, 1, 1]]
    )
    y = ops.convert_to_numpy(ops.cast(ours(ops.cast(x, "float16"), training=True), "float64"))
    expected = (x[:, :6] - x[:, :6].mean(0)) / np.sqrt(x[:, :6].var(0) + 1e-3)
    np.testing.assert_allclose(y[:, :6], expected, rtol=2.0**-9, atol=1e-5)
    assert np.isnan(y[:3, 6:]).all()
    assert np.isfinite(ours.moving_variance.numpy()[:6]).all()


@pytest.mark.skipif(not TENSORFLOW, reason="JAX jits every step, and XLA fuses it")
def test_one_kernel_where_no_compiler_fuses():
    import tensorflow as tf

    for shape in ((4, 6, 5, 8), (4, 6, 8)):
        layer = stabilized("mixed_bfloat16", shape)
        step = tf.function(lambda x, layer=layer: layer(x, training=True))
        operations = step.get_concrete_function(tf.TensorSpec(shape, "bfloat16")).graph.get_operations()
        assert "SquaredDifference" not in {operation.type for operation in operations}
        [kernel] = [operation for operation in operations if operation.type == "FusedBatchNormV3"]
        assert kernel.inputs[0].shape[0] == 4  # cuDNN has limits for the first axis
