"""Layers that take sines and cosines of large angles, against numpy in float64."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mp

LOW = "bfloat16"


@pytest.fixture(autouse=True)
def mixed_bfloat16(float32_policy):
    keras.config.set_dtype_policy("mixed_bfloat16")


class Fourier(layers.Layer):
    @staticmethod
    def waves(angles):
        return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)

    def call(self, times):
        return self.waves(times[:, None] * ops.exp(-ops.arange(8, dtype=times.dtype)))


class FourierInFloat32(layers.Layer):
    def call(self, times):
        angles = ops.cast(times, "float32")[:, None] * ops.exp(-ops.arange(8, dtype="float32"))
        return ops.cast(ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1), self.compute_dtype)


class FourierAndDense(FourierInFloat32):
    """With a layer inside, as the time steps of Stable Diffusion 3 have."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(16, use_bias=False, kernel_initializer="identity")

    def call(self, times):
        return self.dense(super().call(times))


def error(got, expected):
    got = np.asarray(ops.convert_to_numpy(ops.cast(got, "float32")), np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def model_of(layer, shape):
    inputs = keras.Input(shape)
    return keras.Model(inputs, layers.Rescaling(1.0, dtype="float32")(layer(inputs)))


@pytest.mark.jax
def test_positions():
    layer = pytest.importorskip("keras_hub").layers.SinePositionEncoding()
    model = model_of(layer, (2000, 32))
    places, width = np.arange(2000.0)[:, None], np.arange(32)
    angles = places * 10000.0 ** -(2 * (width // 2) / 32)
    expected = np.where(width % 2, np.cos(angles), np.sin(angles))[None]
    x = np.zeros((1, 2000, 32), "float32")
    assert error(model(x), expected) > 0.3
    (row,) = [each for each in keras_mp.stability.sensitive.sensitive_layers(model) if each.layer is layer]
    assert row.reason == "it takes the sine or cosine of angles that it computes in bfloat16"
    keras_mp.stabilize(model)
    assert error(model(x), expected) < 0.01
    assert keras.backend.standardize_dtype(layer(x).dtype) == "bfloat16"


@pytest.mark.parametrize("kind, precision", [(Fourier, "float32"), (FourierInFloat32, LOW), (FourierAndDense, LOW)])
def test_times(kind, precision):
    layer = kind()
    model = model_of(layer, ())
    times = np.random.default_rng().uniform(0, 1000, 64).astype("float32")
    angles = times.astype("float64")[:, None] * np.exp(-np.arange(8.0))
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    trained = keras.Model(model.input, layers.Dense(1, dtype="float32")(model.output))
    trained.compile("sgd", "mse")
    data = times, expected[:, :1]
    assert error(model(times), expected) > 0.1
    assert layer.name in [suspect.path for suspect in keras_mp.audit(trained, data).suspects("mixed_bfloat16")]
    keras_mp.stabilize(model)
    assert error(model(times), expected) < 0.01
    assert layer.compute_dtype == precision and keras.backend.standardize_dtype(layer(times).dtype) == LOW
    assert layer.name not in [suspect.path for suspect in keras_mp.audit(trained, data).suspects("mixed_bfloat16")]
    assert not keras_mp.stability.sensitive.sensitive_layers(model)
    assert layer.autocast == (precision == "float32") and keras_mp.revert(model) and layer.autocast
