"""Training for int8 and int4 on several replicas, in a process of its own; test_with_the_rest.py starts it."""

import contextlib

import keras
import numpy as np
import pytest
from replicas import REPLICAS, scope, values_on_each

import keras_mp


@contextlib.contextmanager
def one_device():
    several = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    yield
    keras.distribution.set_distribution(several)


@pytest.mark.parametrize("mode", ["qat_int8", "qat_int4"])
def test_a_step_is_that_of_one_device(mode):
    generator = np.random.default_rng()
    x, y = generator.integers(0, 40, (8, 6)).astype("int32"), generator.normal(size=(8, 6, 4)).astype("float32")
    models = []
    for devices in (one_device, scope):
        with devices():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Embedding(40, 16), keras.layers.Dense(16, "gelu"), keras.layers.Dense(4)]
            model = keras_mp.convert(keras.Sequential([keras.Input((6,), dtype="int32"), *layers]), mode)
            before = [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
            model.compile(keras.optimizers.SGD(1.0), "mse")
            model.fit(x, y, batch_size=8, verbose=0)
        models.append(model)
    one, several = models
    for variable, split, start in zip(one.trainable_variables, several.trainable_variables, before, strict=True):
        step = keras.ops.convert_to_numpy(variable) - start
        values = values_on_each(split)
        assert len(values) == REPLICAS and np.abs(step).max() > 1e-4
        for value in values:
            np.testing.assert_allclose(value - start, step, atol=1e-5 * np.abs(step).max() + 1e-7)
