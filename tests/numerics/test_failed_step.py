"""What is said where a step cannot be run, and the models whose loss comes another way."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_mp


class NoFloat16(keras.layers.Layer):
    """As an operation that has no kernel for float16 on some device."""

    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) == "float16":
            raise TypeError("no kernel for float16")
        return 2 * x


def batch():
    rng = np.random.default_rng()
    return rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")


def model_with(layer):
    model = keras.Sequential([keras.layers.Dense(4), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model(batch()[0][:1].astype("float32"))
    return model


def test_a_precision_that_plain_keras_cannot_train_in_is_not_called_bad_data():
    plain = model_with(NoFloat16())
    low = model_with(NoFloat16())
    for layer in low.layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    said = "cannot make a training step in float16.* plain Keras fails, too: .*no kernel for float16"
    with pytest.raises(ValueError, match=said):
        keras_mp.numerics.find_nonfinite(low, batch())
    assert keras_mp.numerics.find_nonfinite(plain, batch()) is None


class Weighted(keras.Model):
    """A compile() of its own, without get_compile_config(), that keeps what compute_loss reads."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compile(self, optimizer, exponent):
        super().compile(optimizer)
        self.exponent = exponent

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred) ** self.exponent)

    def get_config(self):
        return {"name": self.name}


def test_what_a_compile_of_ones_own_keeps_for_compute_loss_is_carried():
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = batch()
    model = Weighted()
    model(x)
    model.compile("sgd", exponent=3.0)
    kernel, bias = model.get_weights()
    expected = (np.abs(y - (x.astype("float64") @ kernel + bias)) ** 3).mean()
    assert np.isclose(keras_mp.audit(model, (x, y)).loss, expected, rtol=1e-5)
