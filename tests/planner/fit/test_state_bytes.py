"""What shapes alone say of a step, against the arrays of a real model."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import Source
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.measures import MEASURES, Measures
from keras_mp.planner.fit.step import Step


def build():
    layers = [keras.Input((16,)), keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(7)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def helps(step, name, taken=()):
    """Whether a measure makes a step smaller in bfloat16, beside others."""
    (measure,) = (one for one in MEASURES if one.name == name)
    return step.helps(Measures("mixed_bfloat16", taken), measure)


def nbytes(variables):
    return sum(np.asarray(keras.ops.convert_to_numpy(variable)).nbytes for variable in variables)


def test_state_is_that_of_the_arrays():
    rows = 8
    x, y = np.ones((rows, 16), "float32"), np.ones((rows, 7), "float32")
    model = build()
    model.train_on_batch(x, y)
    place = find_place("h100")
    step = Step(Source(build), (x, y), place.traced)
    plain = step.state(place, Measures("float32"))
    assert plain.parameters == nbytes(model.weights)
    assert plain.optimizer == nbytes(model.optimizer.variables)
    assert plain.other == nbytes(model.metrics_variables) + x.nbytes + y.nbytes
    divided = step.state(place, Measures("float32", micro_batches=4))
    accumulating = keras_mp.loss_scaling.change_optimizer(build(), accumulate=4)
    accumulating.optimizer.build(accumulating.trainable_variables)
    assert divided.optimizer == nbytes(accumulating.optimizer.variables)
    assert divided.other == nbytes(model.metrics_variables) + (x.nbytes + y.nbytes) // 4


def test_several_devices_hold_a_share_of_what_they_divide():
    step = Step(Source(build), (keras.KerasTensor((8, 16)), keras.KerasTensor((8, 7))), TracedChip("gpu"))
    place = find_place("v5e-4")
    copied = step.state(place, Measures("float32", strategy="data"))
    sharded = step.state(place, Measures("float32", strategy="fully_sharded"))
    # Only the last layer's bias, of 7 numbers, is divided by 4 in no axis.
    weights = 4 * (16 * 64 + 64 + 4 * 64 + 64 * 7 + 7)
    assert copied.parameters == weights
    assert sharded.parameters == (weights - 4 * 7) // 4 + 4 * 7
    assert copied.peak - sharded.peak > copied.peak // 2


def test_states_in_8_bits_are_those_of_the_arrays():
    def wide(optimizer=None):
        # The first kernel is stored in 8 bits, the biases and the last kernel, of 448 values, are too small for it.
        model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(64), keras.layers.Dense(7)])
        model.compile(optimizer or keras.optimizers.Adam(), "mse")
        return model

    x, y = np.ones((8, 128), "float32"), np.ones((8, 7), "float32")
    place = find_place("h100")
    step = Step(Source(wide), (x, y), place.traced)
    assert helps(step, "float8 states")
    trained = keras_mp.loss_scaling.change_optimizer(wide(), state_dtype="float8")
    trained.optimizer.build(trained.trainable_variables)
    small = step.state(place, Measures("float32", ("float8 states",)))
    assert small.optimizer == nbytes(trained.optimizer.variables)
    plain = step.state(place, Measures("float32"))
    # Both moments of the first kernel: 3 bytes a value less, and a scale a row; beside them 16 scalars of the wrapper.
    assert 0 <= small.optimizer - (plain.optimizer - 2 * (3 * 128 * 64 - 4 * 128)) <= 16 * 4
    assert (small.parameters, small.other) == (plain.parameters, plain.other)
    sharded = Measures("float32", ("float8 states",), strategy="fully_sharded")
    four = step.state(find_place("v5e-4"), sharded)
    kept_whole = 3 * 4 * 7  # the last bias and its moments, which 4 does not divide
    assert abs(four.peak - (small.parameters + small.optimizer) / 4 - 3 / 4 * kept_whole - four.other) < 256


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "small", "trained", "float8"])
def test_which_optimizers_have_states_that_8_bits_make_smaller(optimizer):
    width = 8 if optimizer == "small" else 64
    x = np.ones((8, width), "float32")
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
    momentum = 0.9 if optimizer == "momentum" else 0.0
    model.compile(keras.optimizers.SGD(0.1, momentum) if optimizer in ("sgd", "momentum") else "adam", "mse")
    if optimizer == "trained":  # whose optimizer may not start anew
        model.fit(x, x, verbose=0)
    elif optimizer == "float8":
        keras_mp.loss_scaling.change_optimizer(model, state_dtype="float8")
    assert helps(Step(Source(model), (x, x), TracedChip("gpu")), "float8 states") is (optimizer == "momentum")


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step reads the host's memory on JAX alone")
def test_slots_in_the_memory_of_the_host_take_none_of_the_device():
    def made(memory):
        model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(64)])
        adam = keras.optimizers.Adam()
        return keras_mp.prepare(model, adam, "mse", state_memory=memory, release_gradients=True)

    batch, place = (keras.KerasTensor((8, 128)), keras.KerasTensor((8, 64))), find_place("h100")
    figures = {}
    for memory in ("device", "host"):
        figures[memory] = Step(Source(lambda memory=memory: made(memory)), batch, TracedChip("gpu")).state(
            place, Measures("float32")
        )
    on_host = figures["host"].host
    assert on_host >= 2 * 4 * 128 * 64 and figures["device"].host == 0
    assert figures["device"].peak - figures["host"].peak == figures["device"].optimizer - figures["host"].optimizer > 0
    assert figures["host"].optimizer + on_host == figures["device"].optimizer
