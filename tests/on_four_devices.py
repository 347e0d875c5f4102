"""Tests that need JAX with four virtual CPUs, so a process of their own; test_optimizer_replicas.py starts it."""

import jax
import keras
import numpy as np
import pytest

import keras_mp

assert len(jax.devices()) == 4, "start with XLA_FLAGS=--xla_force_host_platform_device_count=4"
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))

KINDS = [keras_mp.LossScale(initial_scale=4.0), keras_mp.NoLossScale()]
ROWS = [[1.0, 2.0], [3.0, 4.0], [1.0, 4.0], [3.0, 2.0]]  # a row for each device; their mean, the gradient, is [2, 3]


def train(inner, loss_scale, batches):
    """Fits a 2-vector w to the mean of x . w over batches of four rows: the gradient is the mean of x."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), dense])
    optimizer = keras_mp.LossScaleOptimizer(inner(), loss_scale)
    model.compile(optimizer, loss=lambda _, y: y)
    x = np.array(batches, "float32").reshape(-1, 2)
    model.fit(x, np.zeros((len(x), 1), "float32"), batch_size=4, verbose=0, shuffle=False)
    values = [np.asarray(shard.data) for shard in dense.kernel.value.addressable_shards]
    assert len(values) == 4
    for value in values:
        np.testing.assert_array_equal(value, values[0])
    return values[0].ravel(), optimizer


@pytest.mark.parametrize("loss_scale", KINDS)
@pytest.mark.parametrize("bad, value", [(0, np.inf), (2, -np.inf), (3, np.nan)])
def test_overflow_on_any_device_skips_on_all(loss_scale, bad, value):
    rows = np.array(ROWS)
    rows[bad, 0] = value
    kernel, optimizer = train(lambda: keras.optimizers.SGD(1.0), loss_scale, [rows, ROWS])
    np.testing.assert_array_equal(kernel, [-1.0, -2.0])
    assert int(optimizer.iterations) == 1
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.dynamic_scale) == (2.0 if loss_scale is KINDS[0] else 1.0)


@pytest.mark.parametrize("loss_scale", KINDS)
@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 1.0}])
def test_accumulation_by_4_with_a_bad_micro_batch(loss_scale, clip):
    batches = [np.array(ROWS) * step for step in (1.0, 2.0, 3.0, 4.0)]
    bad = np.array([[0.0, 1.0]] * 3 + [[np.inf, 1.0]])

    def inner():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=4, **clip)

    kernel, optimizer = train(inner, loss_scale, [batches[0], bad, *batches[1:]])
    gradient = np.array([2.0, 3.0]) * 2.5
    expected = 1.0 - (gradient / np.linalg.norm(gradient) if clip else gradient)
    np.testing.assert_allclose(kernel, expected, rtol=1e-6)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("loss_scale", KINDS)
@pytest.mark.parametrize("setting", ["clipnorm", "global_clipnorm"])
def test_clipping_to_1_moves_by_exactly_1(loss_scale, setting):
    rows = [[0.0, 64.0], [0.0, 192.0]] * 2
    kernel, _ = train(lambda: keras.optimizers.SGD(1.0, **{setting: 1.0}), loss_scale, [rows])
    np.testing.assert_array_equal(kernel, [1.0, 0.0])


@pytest.mark.parametrize("loss_scale", KINDS)
def test_averages_overwrite_the_weights_where_they_are_due(loss_scale):
    def inner():
        return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    kernel, _ = train(inner, loss_scale, [ROWS, [[np.inf, 0.0]] * 4, ROWS])
    # Weights 1 - g and 1 - 2g, averages 1 - g and 1 - 1.5g; fit ends with the average.
    np.testing.assert_array_equal(kernel, [1.0 - 1.5 * 2.0, 1.0 - 1.5 * 3.0])


def test_wrap_optimizer_checks_where_there_are_several_devices():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras_mp.wrap_optimizer(keras.optimizers.SGD(), model)
    assert isinstance(optimizer.loss_scale, keras_mp.NoLossScale)


def test_a_skipped_step_changes_no_device():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(inputs)))
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse", metrics=["mae"])
    keras_mp.atomic_skip(model)
    x, y = np.array(ROWS, "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, verbose=0)
    before = [variable.numpy() for variable in [*model.variables, *model.optimizer.inner_optimizer.variables]]
    bad = x.copy()
    bad[1, 0] = np.inf
    assert np.isfinite(model.fit(bad, y, verbose=0).history["loss"]).all()
    after = [variable.numpy() for variable in [*model.variables, *model.optimizer.inner_optimizer.variables]]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.optimizer.skipped_steps.numpy() == 1
