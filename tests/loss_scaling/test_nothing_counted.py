"""The logs of an epoch in which every step was skipped: nothing was counted, and nothing may look good."""

import warnings

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.jax


def model_and_data(scale=2.0**126, **options):
    rng = np.random.default_rng()
    scale = keras_mp.LossScale(initial_scale=scale, max_scale=scale)
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01), scale)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    x = rng.normal(size=(24, 4)).astype("float32")
    return keras_mp.loss_scaling.atomic_skip(model), x, 100 * x[:, :1]


@pytest.mark.parametrize("eager", [False, True])
def test_an_epoch_without_a_step_is_nan_with_one_warning(eager):
    model, x, y = model_and_data(run_eagerly=eager)
    x[:] = np.nan
    with pytest.warns(UserWarning, match="no step counts: all were skipped.*PrecisionMonitor.*NonFiniteFinder") as told:
        history = model.fit(x, y, batch_size=8, epochs=1, verbose=0).history
    assert len([w for w in told if "no step counts" in str(w.message)]) == 1
    assert np.isnan(history["loss"]).all() and np.isnan(history["mae"]).all()


def test_the_first_steps_show_their_own_finite_loss_until_one_counts():
    """A scale of 2^126 overflows the gradients of finite losses: so does a healthy float16 training begin."""
    model, x, y = model_and_data()
    each = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: each.append(dict(logs)))
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    own = model.evaluate(x[:8], y[:8], verbose=0)[0]
    assert int(model.optimizer.skipped_steps) == 1 and np.isfinite(own)
    stop = keras.callbacks.TerminateOnNaN()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=[log, stop])
    assert len(each) == 12 and all(np.isfinite(list(logs.values())).all() for logs in each)
    skipped = int(model.optimizer.skipped_steps)
    assert 1 < skipped < 13 and (each[0]["loss"] != each[1]["loss"])  # other rows, and not a mean of both


def test_steps_that_count_are_the_epoch_s_mean():
    model, x, y = model_and_data(scale=2.0**10)
    x[8:16] = np.inf
    model.optimizer.learning_rate = 0.0
    outputs = [keras.ops.convert_to_numpy(model(part, training=True)) for part in (x[:8], x[16:])]
    expected = np.mean([np.mean((out - target) ** 2) for out, target in zip(outputs, (y[:8], y[16:]), strict=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
