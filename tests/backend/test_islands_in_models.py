"""Whole models with islands and without: gradients, and saved files."""

import keras
import numpy as np
import pytest
from jitted_programs import jitted_in_step, with_islands
from keras import layers

import keras_mp

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX has no graph that is not jitted", allow_module_level=True)

ROWS, CLASSES = 6, 16


class Kept(keras.optimizers.SGD):
    """Leaves each gradient in the place of its weight."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, gradient)


# Without a bias whose gradient is zero: what rounding leaves there has no relation to anything.
def network():
    """Convolutions whose places are the tokens of a transformer's block."""
    x = images = keras.Input((16, 16, 3))
    for filters, step in ((64, 4), (64, 1), (32, 2)):
        x = layers.BatchNormalization()(layers.Conv2D(filters, step, step, use_bias=False)(x))
        x = layers.Activation("gelu")(x)
    x = layers.Reshape((4, 32))(x)
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 8, use_bias=False)(y, y, use_causal_mask=True)
    x = x + layers.Dense(32)(layers.Dense(64, "silu")(layers.RMSNormalization()(x)))
    return keras.Model(images, layers.Dense(CLASSES)(x))


def dense_network():
    sizes = [layers.LayerNormalization(), layers.Dense(32, "gelu"), layers.RMSNormalization(), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((8,)), *sizes])


def batch_for(model, rng):
    x, y = model.inputs[0], model.outputs[0]
    return rng.normal(size=(ROWS, *x.shape[1:])).astype("float32"), rng.integers(0, CLASSES, (ROWS, *y.shape[1:-1]))


def prepared(build, optimizer):
    keras.utils.clear_session()  # which numbers the layers' names
    keras.utils.set_random_seed(5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(build(), optimizer, loss)


def test_gradients_of_a_model_in_float32():
    batch = batch_for(network(), np.random.default_rng())
    models = [prepared(network, Kept(1.0)) for _ in range(2)]
    for model, islands in zip(models, (True, False), strict=True):
        with with_islands(islands):
            model.fit(*batch, batch_size=ROWS, verbose=0)
    for variable, same in zip(*(model.trainable_variables for model in models), strict=True):
        one, other = variable.numpy(), same.numpy()
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(other).max(), err_msg=variable.path)


def test_a_model_with_islands_is_saved_and_exported_as_one_without(tmp_path):
    keras_mp.set_global_policy("mixed_bfloat16")
    x, y = batch_for(dense_network(), np.random.default_rng())
    model, plain = (prepared(dense_network, "adam") for _ in range(2))
    assert len(jitted_in_step(model, x, y)) > 1
    with with_islands(False):
        assert not jitted_in_step(plain, x, y)
    model.fit(x, y, batch_size=3, epochs=2, verbose=0)
    assert model.to_json() == plain.to_json()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    for saved, own in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), own.numpy())
    model.export(tmp_path / "model", verbose=False)
    assert b"_XlaMustCompile" not in (tmp_path / "model" / "saved_model.pb").read_bytes()
