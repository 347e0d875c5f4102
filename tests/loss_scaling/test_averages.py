"""Moving averages of weights, which `fit` leaves in the model: a second `fit` goes on from them."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp


def in_numpy(weight, batches, fits, rate, momentum):
    """Gradient descent on mean squares of a linear model in float64, whose weights are averages after each fit."""
    average, steps = None, 0
    for _ in range(fits):
        for x, y in batches:
            weight = weight - rate * 2 * x.T @ (x @ weight - y) / len(x)
            average = weight if steps == 0 else momentum * average + (1 - momentum) * weight
            steps += 1
        weight = average
    return weight


@pytest.mark.jax
@pytest.mark.parametrize("every", [None, 2])
def test_three_fits_go_on_from_the_averages(every):
    x, y = np.random.default_rng().normal(size=(2, 16, 3))
    y = y[:, :1]
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, use_bias=False)])
    start = np.float64(model.get_weights()[0])
    inner = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=every)
    model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none()), "mse")
    for _ in range(3):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]  # two steps, so that an overwrite every two comes at the end, too
    np.testing.assert_allclose(model.get_weights()[0], in_numpy(start, batches, 3, 0.01, 0.75), rtol=1e-4, atol=1e-5)


def test_averages_are_put_in_the_weights_at_every_second_step():
    x = np.random.default_rng().normal(size=(8, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, use_bias=False)])
    inner = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=2)
    model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none()), "mse")
    for step in range(4):
        model.train_on_batch(x, x[:, :1])
        average = keras.ops.convert_to_numpy(inner._model_variables_moving_average[0])
        assert np.array_equal(model.get_weights()[0], average) == (step != 2)  # the average begins as the weight


@pytest.mark.jax
def test_weights_in_bfloat16_go_on_from_their_averages():
    x = np.random.default_rng().normal(size=(16, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, dtype="bfloat16")])
    inner = keras.optimizers.Adam(0.01, use_ema=True)
    model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none()), "mse")
    for _ in range(3):
        model.fit(x, x[:, :1], verbose=0)
        for weight, average in zip(model.trainable_variables, inner._model_variables_moving_average, strict=True):
            expected = keras.ops.convert_to_numpy(average)
            actual = keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))
            np.testing.assert_allclose(actual, expected, rtol=2**-8)
