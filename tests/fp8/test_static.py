"""Static scales of FP8: calibrated in the first steps, then fixed. test_delayed.py has their trajectories."""

import keras
import numpy as np
import pytest
from reference import cast, quantized_by, tensors, to_numpy, with_gradients

from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.quantize import known_magnitude, known_of, next_history


def history(amax, steps):
    """Of three roles, after so many steps."""
    return np.array([[0.0, amax, steps]] * 3, "float32")


def test_after_the_calibration_a_larger_value_saturates_and_changes_nothing():
    recipe = Scalings.named("static", history=4, margin=0, format="E4M3")
    x = np.random.default_rng().normal(size=(8, 16)).astype("float32")
    x[3, 5] = 100.0
    (known,) = tensors(history(2.0, 4))
    values, scale = quantized_by(recipe, *tensors(x), "input", row=known[0])
    assert float(scale) == 224.0 and to_numpy(values)[3, 5] == 448.0
    np.testing.assert_array_equal(to_numpy(values), cast(np.clip(x * 224, -448, 448), "E4M3").astype("float64"))
    assert float(known_magnitude(*tensors(x), recipe.of("input")[0], known_of(known, "input", recipe))) == 0.0
    following = next_history(known, recipe, list(tensors(0.0, 0.0, 0.0)))
    np.testing.assert_array_equal(to_numpy(following), history(2.0, 5))


def test_while_it_calibrates_the_step_itself_counts():
    recipe = Scalings.named("static", history=4, margin=0)
    x = np.random.default_rng().uniform(3, 4, size=(8, 16)).astype("float32")
    (known,) = tensors(history(2.0, 3))
    assert float(quantized_by(recipe, *tensors(x), "input", row=known[0]).scale) == np.float32(448) / x.max()
    assert float(known_magnitude(*tensors(x), recipe.of("input")[0], known_of(known, "input", recipe))) == x.max()


@pytest.mark.parametrize("bad, steps", [(np.inf, 0), (-np.inf, 100), (np.nan, 0), (np.nan, 100)])
def test_what_is_not_finite_stays_visible(bad, steps):
    recipe = Scalings.named("static")
    x, w, g = (np.random.default_rng().normal(size=(8, 8)).astype("float32") for _ in range(3))
    x[2, 3] = bad
    (known,) = tensors(history(4.0, steps))
    run = with_gradients(lambda x, w: matmul(x, w, recipe, history=known))
    y, dx, dw = (to_numpy(each) for each in run(*tensors(x, w, g)))
    assert not np.isfinite(y[2]).any() and not np.isfinite(dw[3]).any()
    assert np.isfinite(np.delete(y, 2, axis=0)).all() and np.isfinite(dx).all()


def test_without_a_history_it_is_current_scaling():
    x, w, g = tensors(*(np.random.default_rng().normal(size=(16, 16)) for _ in range(3)))
    static, current = Scalings.named("static", margin=0), Scalings.named("current")
    for found, expected in zip(
        with_gradients(lambda x, w: matmul(x, w, static))(x, w, g),
        with_gradients(lambda x, w: matmul(x, w, current))(x, w, g),
        strict=True,
    ):
        np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


def test_it_is_a_value():
    recipe = Scalings.named("static", history=3, margin=2, format="E4M3")
    assert str(recipe) == "Scalings.named('static', history=3, margin=2, format='E4M3')"
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert again == recipe and hash(again) == hash(recipe) and again.kept == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"history": 0}, "history=0 must be a whole number, 1 or more"),
        ({"margin": 0.5}, "margin=0.5 must be a whole number, 0 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scalings.named("static", **arguments)
