"""Whole models with islands and without: gradients, and saved files."""

import keras
import numpy as np
import pytest
from jitted_programs import jitted_in_step
from keras import layers

import keras_mp

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX has no graph that is not jitted", allow_module_level=True)

TOKENS, CLASSES = (6, 12), 16


class Kept(keras.optimizers.SGD):
    """Leaves each gradient in the place of its weight."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, gradient)


# Without a bias whose gradient is zero: what rounding leaves there has no relation to anything.
def transformer():
    x = tokens = keras.Input(TOKENS[1:], dtype="int32")
    x = layers.Embedding(CLASSES, 32)(x)
    for activation in ("gelu", "silu"):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 8, use_bias=False)(y, y, use_causal_mask=True)
        x = x + layers.Dense(32)(layers.Dense(64, activation)(layers.RMSNormalization()(x)))
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def convolutions():
    x = images = keras.Input((16, 16, 3))
    for filters, step in ((64, 4), (64, 1), (32, 2)):
        x = layers.BatchNormalization()(layers.Conv2D(filters, step, step, use_bias=False)(x))
        x = layers.Activation("gelu")(x)
    return keras.Model(images, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def batch_for(model, rng):
    x, y = model.inputs[0], model.outputs[0]
    rows = TOKENS[0]
    if x.dtype == "int32":
        return rng.integers(0, CLASSES, TOKENS), rng.integers(0, CLASSES, (rows, *y.shape[1:-1]))
    return rng.normal(size=(rows, *x.shape[1:])).astype("float32"), rng.integers(0, CLASSES, rows)


def prepared(build, optimizer, islands):
    keras.utils.clear_session()  # which numbers the layers' names
    keras.utils.set_random_seed(5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(build(), optimizer, loss, islands=islands)


@pytest.mark.parametrize("build", [transformer, convolutions])
def test_gradients_of_a_model_in_float32(build):
    batch = batch_for(build(), np.random.default_rng())
    models = [prepared(build, Kept(1.0), islands) for islands in (True, False)]
    with_islands, without = (len(jitted_in_step(model, *batch)) for model in models)
    assert with_islands > 1 and without == 0
    for model in models:
        model.fit(*batch, batch_size=TOKENS[0], verbose=0)
    for variable, same in zip(*(model.trainable_variables for model in models), strict=True):
        one, other = variable.numpy(), same.numpy()
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(other).max(), err_msg=variable.path)


@pytest.mark.parametrize("build", [transformer, convolutions])
def test_a_model_with_islands_is_saved_as_one_without(build, tmp_path):
    keras_mp.set_global_policy("mixed_bfloat16")
    x, y = batch_for(build(), np.random.default_rng())
    model, plain = (prepared(build, "adam", islands) for islands in (True, False))
    assert len(jitted_in_step(model, x, y)) > 1
    model.fit(x, y, batch_size=3, epochs=2, verbose=0)
    assert model.to_json() == plain.to_json()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    for saved, own in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), own.numpy())
