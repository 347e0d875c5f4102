"""Tests that need TensorFlow with two logical CPUs, so a process of their own; test_optimizer_replicas.py starts it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mp

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

KINDS = [keras_mp.LossScale(initial_scale=4.0), keras_mp.NoLossScale()]


def train(inner, loss_scale, batches, kernel="ones", rate=1.0):
    """Fits a 2-vector w to the sum of x . w over batches of two rows, one for each replica: the gradient is x."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=kernel)
        model = keras.Sequential([keras.Input((2,)), dense])
        optimizer = keras_mp.LossScaleOptimizer(inner(), loss_scale)
        model.compile(optimizer, loss=lambda _, y: y, jit_compile=False)
    x = np.array(batches, "float32").reshape(-1, 2)
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros((len(x), 1), "float32"))).batch(2)
    model.fit(data, verbose=0, shuffle=False)
    values = [value.numpy() for value in strategy.experimental_local_results(dense.kernel.value)]
    np.testing.assert_array_equal(values[0], values[1])
    return values[0].ravel(), optimizer


ROWS = [[1.0, 2.0], [3.0, 4.0]]  # their mean, the gradient, is [2, 3]


@pytest.mark.parametrize("loss_scale", KINDS)
@pytest.mark.parametrize("bad, value", [(0, np.inf), (1, -np.inf), (1, np.nan)])
def test_overflow_on_either_replica_skips_on_both(loss_scale, bad, value):
    rows = np.array(ROWS)
    rows[bad, 0] = value
    kernel, optimizer = train(lambda: keras.optimizers.SGD(1.0), loss_scale, [rows, ROWS])
    np.testing.assert_array_equal(kernel, [-1.0, -2.0])
    assert keras.ops.convert_to_numpy(optimizer.iterations) == 1
    assert optimizer.skipped_steps.numpy() == 1
    assert optimizer.consecutive_skips.numpy() == 0
    assert optimizer.dynamic_scale.numpy() == (2.0 if loss_scale is KINDS[0] else 1.0)


@pytest.mark.parametrize("loss_scale, clip", [(KINDS[0], {}), (KINDS[1], {"global_clipnorm": 1.0})])
def test_accumulation_by_4_with_a_bad_micro_batch(loss_scale, clip):
    batches = [np.array(ROWS) * step for step in (1.0, 2.0, 3.0, 4.0)]
    bad = np.array([[0.0, 1.0], [np.inf, 1.0]])

    def inner():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=4, **clip)

    kernel, optimizer = train(inner, loss_scale, [batches[0], bad, *batches[1:]])
    gradient = np.array([2.0, 3.0]) * 2.5
    expected = 1.0 - (gradient / np.linalg.norm(gradient) if clip else gradient)
    np.testing.assert_allclose(kernel, expected, rtol=1e-6)
    assert keras.ops.convert_to_numpy(optimizer.iterations) == 1


def test_a_checkpoint_holds_the_window_of_both_replicas():
    def inner():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)

    kernel, optimizer = train(inner, KINDS[0], [ROWS])
    np.testing.assert_array_equal(kernel, [1.0, 1.0])
    total = optimizer._sums[0]
    np.testing.assert_array_equal(total.numpy().ravel(), [2.0, 3.0])  # each replica's half mean, added up
    store = {}
    optimizer.save_own_variables(store)
    optimizer.load_own_variables(store)
    np.testing.assert_array_equal(total.numpy().ravel(), [2.0, 3.0])


@pytest.mark.parametrize(
    "loss_scale, setting", [(KINDS[0], "global_clipnorm"), (KINDS[1], "global_clipnorm"), (KINDS[0], "clipnorm")]
)
def test_clipping_to_1_moves_by_exactly_1(loss_scale, setting):
    rows = [[0.0, 64.0], [0.0, 192.0]]
    kernel, _ = train(lambda: keras.optimizers.SGD(1.0, **{setting: 1.0}), loss_scale, [rows])
    np.testing.assert_array_equal(kernel, [1.0, 0.0])


@pytest.mark.parametrize("loss_scale", KINDS)
def test_averages_overwrite_the_weights_where_they_are_due(loss_scale):
    def inner():
        return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    kernel, _ = train(inner, loss_scale, [ROWS, [[np.inf, 0.0], [0.0, 0.0]], ROWS])
    # Weights 1 - g and 1 - 2g, averages 1 - g and 1 - 1.5g; fit ends with the average.
    np.testing.assert_array_equal(kernel, [1.0 - 1.5 * 2.0, 1.0 - 1.5 * 3.0])


def test_sparse_gradients_are_added_up():
    with strategy.scope():
        embedding = keras.layers.Embedding(4, 1, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), embedding])
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=5.0), KINDS[0])
        model.compile(optimizer, loss=lambda _, y: keras.ops.sum(y, axis=-1), jit_compile=False)
    tokens = np.array([[0, 0], [0, 1]], "int32")  # each replica counts half: gradient [3, 1, 0, 0] / 2
    model.fit(tf.data.Dataset.from_tensor_slices((tokens, tokens)).batch(2), verbose=0)
    np.testing.assert_allclose(embedding.embeddings.numpy().ravel(), [-1.5, -0.5, 0, 0])


@pytest.mark.parametrize("optimizer", ["AdamW", "Nadam", "Adafactor"])
def test_other_optimizers_do_on_two_replicas_as_on_one(optimizer):
    batches = [ROWS, [[-1.0, 5.0], [2.0, 0.0]], [[0.5, 1.0], [1.0, -3.0]]]
    kernel, _ = train(lambda: getattr(keras.optimizers, optimizer)(0.1), KINDS[0], batches)
    weight = keras.Variable(np.ones((2, 1), "float32"))
    alone = getattr(keras.optimizers, optimizer)(0.1)
    for batch in batches:
        alone.apply([tf.constant(np.mean(batch, 0, "float32")[:, None])], [weight])
    np.testing.assert_allclose(kernel, weight.numpy().ravel(), rtol=1e-6)


def test_wrap_optimizer_checks_where_there_are_several_replicas():
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras_mp.wrap_optimizer(keras.optimizers.SGD(), model)
    assert isinstance(optimizer.loss_scale, keras_mp.NoLossScale)


def test_a_skipped_step_changes_no_replica():
    with strategy.scope():
        inputs = keras.Input((2,))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(inputs)))
        model.compile(
            keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse", metrics=["mae"], jit_compile=False
        )
    keras_mp.atomic_skip(model)
    x, y = np.array(ROWS, "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(x, y)
    before = [variable.numpy() for variable in [*model.variables, *model.optimizer.inner_optimizer.variables]]
    bad = x.copy()
    bad[1, 0] = np.inf
    assert np.isfinite(model.train_on_batch(bad, y)).all()
    after = [variable.numpy() for variable in [*model.variables, *model.optimizer.inner_optimizer.variables]]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.optimizer.skipped_steps.numpy() == 1
