"""A step that is lowered after `fit` is that of the platform it is lowered for, and not the one that `fit` ran here."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.compile.program_hash import program_hash


@pytest.mark.jax
def test_the_program_is_the_same_before_and_after_fit():
    rows = 4
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(0.1), keras_mp.LossScale.none())
    model.compile(optimizer, "mse", jit_compile=True)
    x, y = np.ones((rows, 3), "float32"), np.ones((rows, 2), "float32")

    def program(platform):
        return program_hash(lower_step(model, (x, y), training=True, chip=TracedChip(platform)).module)

    before = program("cuda")
    model.fit(x, y, batch_size=rows, verbose=0)
    assert program("cuda") == before
    if keras.backend.backend() == "jax":  # else this test asks nothing
        assert program("cpu") != before
