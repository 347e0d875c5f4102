"""What shapes alone say of a step, against the arrays of a real model."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import find_place
from keras_mp.advice.source import Source
from keras_mp.advice.step import Step

pytestmark = pytest.mark.once


def build():
    layers = [keras.Input((16,)), keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(7)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def nbytes(variables):
    return sum(np.asarray(keras.ops.convert_to_numpy(variable)).nbytes for variable in variables)


def test_state_is_that_of_the_arrays():
    rows = 8
    x, y = np.ones((rows, 16), "float32"), np.ones((rows, 7), "float32")
    model = build()
    model.fit(x, y, verbose=0)
    place = find_place("h100")
    step = Step(Source(build), (x, y), place.platform)
    plain = step.state(place, Measures("float32"))
    assert plain.weights == nbytes(model.weights)
    assert plain.optimizer == nbytes(model.optimizer.variables)
    assert plain.other == nbytes(model.metrics_variables) + x.nbytes + y.nbytes
    divided = step.state(place, Measures("float32", micro_batches=4))
    accumulating = keras_mp.accumulate_gradients(build(), 4)
    accumulating.fit(x, y, verbose=0)
    assert divided.optimizer == nbytes(accumulating.optimizer.variables)
    assert divided.other == nbytes(model.metrics_variables) + (x.nbytes + y.nbytes) // 4


def test_several_devices_hold_a_share_of_what_they_divide():
    step = Step(Source(build), (keras.KerasTensor((8, 16)), keras.KerasTensor((8, 7))), "cuda")
    place = find_place("v5e-4")
    copied = step.state(place, Measures("float32", strategy="data"))
    sharded = step.state(place, Measures("float32", strategy="fully_sharded"))
    # Only the last layer's bias, of 7 numbers, is divided by 4 in no axis.
    weights = 4 * (16 * 64 + 64 + 4 * 64 + 64 * 7 + 7)
    assert copied.weights == weights
    assert sharded.weights == (weights - 4 * 7) // 4 + 4 * 7
    assert copied.state - sharded.state > copied.state // 2
