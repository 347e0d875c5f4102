"""Tests on several replicas, which need a process of their own; test_optimizer_replicas.py starts it."""

import keras
import numpy as np
import pytest
from arrays import numpy, values
from jitted_programs import jitted
from replicas import REPLICAS, run, scope, values_on_each
from test_optimizer import stepper

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
MODE = {"jit_compile": not TENSORFLOW}
KINDS = [keras_mp.LossScale(initial_scale=32.0), keras_mp.LossScale.none()]
ROWS = [[1.0, 2.0], [3.0, 4.0], [1.0, 4.0], [3.0, 2.0]][:REPLICAS]  # a row for each; their mean is [2, 3]


def fit(model, x, y):
    return model.fit(x, y, batch_size=REPLICAS, shuffle=False, verbose=0)


def train(inner, loss_scale, batches):
    """Fits a 2-vector w to the mean of x . w over batches of a row for each replica: the gradient is the mean of x."""
    with scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), dense])
        optimizer = keras_mp.LossScaleOptimizer(inner(), loss_scale)
        model.compile(optimizer, loss=lambda _, y: y, **MODE)
    x = np.array(batches, "float32").reshape(-1, 2)
    fit(model, x, np.zeros((len(x), 1), "float32"))
    values = values_on_each(dense.kernel)
    assert len(values) == REPLICAS
    for value in values:
        np.testing.assert_array_equal(value, values[0])
    return values[0].ravel(), optimizer


def test_overflow_on_any_replica_skips_on_all():
    batches = []
    for bad, value in [(0, np.inf), (REPLICAS - 1, -np.inf), (REPLICAS // 2, np.nan)]:
        rows = np.array(ROWS)
        rows[bad, 0] = value
        batches.append(rows)
    kernel, optimizer = train(lambda: keras.optimizers.SGD(1.0), KINDS[0], [*batches, ROWS])
    np.testing.assert_array_equal(kernel, [-1.0, -2.0])
    assert numpy(optimizer.iterations) == 1
    assert numpy(optimizer.skipped_steps) == 3
    assert numpy(optimizer.consecutive_skips) == 0
    assert numpy(optimizer.dynamic_scale) == 4.0


@pytest.mark.parametrize("loss_scale, clip", [(KINDS[0], {"global_clipnorm": 1.0}), (KINDS[1], {"clipnorm": 1.0})])
def test_accumulation_by_4_with_a_bad_micro_batch(loss_scale, clip):
    """The mean over micro-batches and replicas is clipped once; a checkpoint has what all have accumulated since."""
    batches = [np.array(ROWS) * step for step in (1.0, 2.0, 3.0, 4.0, 1.0)]
    bad = np.array([[0.0, 1.0]] * (REPLICAS - 1) + [[np.inf, 1.0]])

    def inner():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=4, **clip)

    kernel, optimizer = train(inner, loss_scale, [batches[0], bad, *batches[1:]])
    gradient = np.array([2.0, 3.0]) * 2.5
    np.testing.assert_allclose(kernel, 1.0 - gradient / np.linalg.norm(gradient), rtol=1e-6)
    assert numpy(optimizer.iterations) == 1
    total = next(variable for variable in optimizer.variables if variable.name.endswith("gradient_sum"))
    np.testing.assert_array_equal(numpy(total).ravel(), [2.0, 3.0])  # each replica's share of the mean, added up
    store = {}
    optimizer.save_own_variables(store)
    optimizer.load_own_variables(store)
    np.testing.assert_array_equal(numpy(total).ravel(), [2.0, 3.0])


def test_averages_overwrite_the_weights_where_they_are_due():
    def inner():
        return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    bad = [[np.inf, 0.0]] + [[0.0, 0.0]] * (REPLICAS - 1)
    kernel, _ = train(inner, KINDS[0], [ROWS, bad, ROWS])
    # Weights 1 - g and 1 - 2g, averages 1 - g and 1 - 1.5g; fit ends with the average.
    np.testing.assert_array_equal(kernel, [1.0 - 1.5 * 2.0, 1.0 - 1.5 * 3.0])


@pytest.mark.skipif(not TENSORFLOW, reason="JAX has no sparse gradients here")
def test_sparse_gradients_are_added_up():
    with scope():
        embedding = keras.layers.Embedding(4, 1, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), embedding])
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=5.0), KINDS[0])
        model.compile(optimizer, loss=lambda _, y: keras.ops.sum(y, axis=-1), **MODE)
    tokens = np.array([[0, 0], [0, 1]], "int32")  # each replica counts half: gradient [3, 1, 0, 0] / 2
    fit(model, tokens, tokens)
    np.testing.assert_allclose(numpy(embedding.embeddings).ravel(), [-1.5, -0.5, 0, 0])


RARELY = [pytest.mark.slow, pytest.mark.rare]
UPDATES = {
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "averages": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, global_clipnorm=1.0),
}


@pytest.mark.skipif(not TENSORFLOW, reason="on JAX a step is one program")
@pytest.mark.parametrize("name", ["AdamW", *(pytest.param(name, marks=RARELY) for name in [*UPDATES][1:])])
def test_the_update_is_a_program_on_each_device_and_that_of_one_with_the_sum(name):
    import tensorflow as tf

    with scope():
        weight = keras.Variable(np.ones((3, 2), "float32"))
        optimizer = keras_mp.LossScaleOptimizer(UPDATES[name](), KINDS[1])
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step(gradients):
        run(lambda gradient: optimizer.apply([gradient[0]], [weight]), gradients)

    assert len(jitted(step.get_concrete_function(tf.TensorSpec((REPLICAS, 3, 2))))) == REPLICAS
    single, alone = keras.Variable(np.ones((3, 2), "float32")), UPDATES[name]()
    for gradients in np.random.default_rng().normal(size=(4, REPLICAS, 3, 2)).astype("float32"):
        step(tf.constant(gradients))
        alone.apply([tf.constant(gradients.sum(0))], [single])
    sums = {id(total) for total in optimizer._sums}  # those of each replica are its own, and begin anew
    for variable in (weight, *(one for one in optimizer.variables if id(one) not in sums)):
        first, *others = values_on_each(variable)
        assert all(np.array_equal(first, other) for other in others), variable.path
    np.testing.assert_allclose(numpy(weight), numpy(single), rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(not TENSORFLOW, reason="JAX has one program for all devices")
def test_an_optimizer_that_was_wrapped_where_there_is_one_device_sums_over_replicas():
    import tensorflow as tf

    with scope():
        weight, optimizer = keras.Variable(np.zeros(2)), keras.optimizers.SGD(1.0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert keras_mp.loss_scaling.wrap_optimizer(optimizer, model) is optimizer
    with scope():
        optimizer.build([weight])
    step = tf.function(lambda rows: run(lambda row: optimizer.apply([row[0]], [weight]), rows), autograph=False)
    step(tf.constant(ROWS, tf.float32))
    for value in values_on_each(weight):
        np.testing.assert_array_equal(value, -np.sum(ROWS, 0))


def test_wrap_optimizer_checks_where_there_are_several_replicas():
    with scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(), model)
    assert isinstance(optimizer.loss_scale, keras_mp.LossScale.none)


@pytest.mark.slow
@pytest.mark.rare
def test_a_checkpoint_within_an_epoch_goes_on_with_the_same_bits(tmp_path):
    """Each replica has a part of the metrics and of the accumulated gradients: the place is between two updates."""
    x = np.random.default_rng().normal(size=(12 * REPLICAS, 2)).astype("float32")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    def trained(folder, *callbacks):
        with scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
            optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
            model.compile(keras_mp.LossScaleOptimizer(optimizer, initial_scale=8.0), "mse", **MODE)
            batches = keras_mp.training.ShuffledBatches(x, x[:, :1], batch_size=3 * REPLICAS, seed=0)
            checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=3)
            try:
                history = model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=[checkpoint, *callbacks])
            except KeyboardInterrupt:
                return None
        return history.history["loss"], model.get_weights()

    losses, expected = trained(tmp_path / "whole")
    assert trained(tmp_path / "cut", Stop()) is None
    resumed, actual = trained(tmp_path / "cut")
    assert resumed == losses
    np.testing.assert_equal(actual, expected)


def test_a_skipped_step_changes_no_replica():
    with scope():
        inputs = keras.Input((2,))
        batch_normalization = keras.layers.BatchNormalization()
        model = keras.Model(inputs, keras.layers.Dense(1)(batch_normalization(inputs)))
        model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse", metrics=["mae"], **MODE)
    keras_mp.loss_scaling.atomic_skip(model)
    x, y = np.array(ROWS, "float32"), np.ones((REPLICAS, 1), "float32")
    fit(model, x, y)
    watched = [*model.variables, *model.optimizer.inner_optimizer.variables]
    before = values(watched)
    bad = x.copy()
    bad[1, 0] = np.inf
    assert np.isnan(fit(model, bad, y).history["loss"]).all()  # no step counts
    np.testing.assert_equal(values(watched), before)
    for value in values_on_each(batch_normalization.moving_mean):
        assert np.isfinite(value).all()
    assert numpy(model.optimizer.skipped_steps) == 1


def test_states_in_8_bits_are_on_each_replica_those_of_one():
    with scope():
        dense = keras.layers.Dense(64, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((64,)), dense])
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.01), KINDS[1], state_dtype="float8")
        model.compile(optimizer, loss=lambda y, out: keras.ops.sum(y * out, axis=-1), **MODE)
    # Integers, whose products and sums are exact in any order.
    draws = np.random.default_rng().integers(-8, 9, (2, 3, REPLICAS, 64)).astype("float32")
    x, y = draws.reshape(2, -1, 64)
    fit(model, x, y)
    weight = keras.Variable(np.ones((64, 64), "float32"))
    alone = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.01), KINDS[1], state_dtype="float8")
    step = stepper(alone, weight, "eager" if TENSORFLOW else "jit")
    for rows, factors in zip(*draws, strict=True):
        step(rows.T @ factors / REPLICAS)
    stored = [[numpy(v) for v in inner.variables if v.dtype == "float8_e4m3fn"] for inner in
              (optimizer.inner_optimizer, alone.inner_optimizer)]  # fmt: skip
    assert len(stored[0]) == 2
    # The mean of a replica is divided once more: one in 2**20 roundings may go the other way.
    assert all(np.mean(a.view("uint8") == b.view("uint8")) > 0.999 for a, b in zip(*stored, strict=True))
    for variable in optimizer.inner_optimizer.variables:
        first, *others = values_on_each(variable)
        assert all(np.array_equal(first, other) for other in others)
