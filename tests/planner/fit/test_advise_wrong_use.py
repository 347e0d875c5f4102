"""What a stranger may ask `advise` wrongly, and the sentence that says so."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

BATCH = (keras.KerasTensor((8, 16)), keras.KerasTensor((8, 4)))


def compiled(loss="mse", **arguments):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(4)], name="small")
    model.compile("adam", loss, **arguments)
    return model


def advise(build=compiled, batch=BATCH, target=("h100",)):
    return keras_mp.advise(build, batch, target, verbose=False)


def test_a_model_without_a_loss():
    with pytest.raises(keras_mp.errors.CompileError, match="model 'small'.*[Nn]o loss.*compile"):
        advise(lambda: compiled(None))


def test_a_model_that_is_not_compiled():
    def build():
        return keras.Sequential([keras.Input((16,)), layers.Dense(4)], name="small")

    for given, said in (
        (build(), r"^model 'small', which is not compiled with .* has both. Call compile\(optimizer, loss\);"),
        (build, r"^build\(\) returns model 'small', which is not compiled .*loss\) in it;"),
    ):
        with pytest.raises(ValueError, match=said):
            advise(given)


def test_targets_of_another_shape_than_the_outputs():
    with pytest.raises(ValueError, match=r"model 'small', its loss or a metric fails .* targets are float32\[8, 5\]"):
        advise(batch=(BATCH[0], keras.KerasTensor((8, 5))))


def test_batches_that_are_none():
    lists = ([[1.0] * 16] * 100, [[1.0] * 4] * 100)
    for batch in (lists, (keras.KerasTensor((None, 16)), keras.KerasTensor((None, 4)))):
        with pytest.raises(ValueError, match="batch must be .x, y., arrays or keras.KerasTensor") as raised:
            advise(batch=batch)
        assert len(str(raised.value)) < 400
    with pytest.raises(ValueError, match="batch must be .x, y. or .x, y, sample_weight. to train model 'small'"):
        advise(batch=np.ones((8, 16)))


def test_chips_that_are_not():
    with pytest.raises(ValueError, match="rtx4091.* is not a known chip. Did you mean 'rtx4090'"):
        advise(target=["rtx4091"])
    with pytest.raises(ValueError, match="8 rows, which the 16 devices of 'v5e-16' do not divide"):
        advise(target=["v5e-16"])
