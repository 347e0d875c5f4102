"""Arguments that no config of a model shows, and layers whose class does not take what Keras writes into theirs."""

import warnings

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.rebuild.arguments import same


class Net(keras.Model):
    """Keras writes its defaults into its config, whatever it was made with."""

    def __init__(self, activation="relu", kept=True):
        super().__init__()
        if kept:
            self.activation, self.kept = activation, kept
        self.dense = keras.layers.Dense(8, activation=activation)
        self.norm = keras.layers.BatchNormalization()

    def call(self, x):
        return self.norm(self.dense(x))


def check_loaded(model, tmp_path):
    """The file of a stabilized model, whose class is not registered, computes the same."""
    x = np.random.default_rng().normal(size=(5, 6)).astype("float32")
    model(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a layer that stabilize cannot see.*")
        keras_mp.stabilize(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=globals())
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_arguments_that_no_config_shows_are_read_off_or_the_file_is_refused(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    check_loaded(Net("tanh"), tmp_path)
    # As by plain Keras: it was another function, with the same weights.
    with pytest.raises(TypeError, match="unexpected keyword argument 'trainable'"):
        check_loaded(Net("tanh", kept=False), tmp_path)


class Block(keras.layers.Layer):
    """Takes no `**kwargs`, so that Keras cannot load what it saves."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.norm = keras.layers.LayerNormalization()
        self.dense = keras.layers.Dense(width)

    def call(self, x):
        return x + self.dense(self.norm(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


class Unwritten(Block):
    """Has no `get_config`, either: Keras reads the arguments of the call off the layer."""

    get_config = keras.layers.Layer.get_config


@pytest.mark.parametrize("cls", [Block, Unwritten])
def test_a_layer_whose_class_takes_no_name_is_loaded_though_keras_cannot(cls, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(cls(6)(inputs)))
    model.save(tmp_path / "plain.keras")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        keras.saving.load_model(tmp_path / "plain.keras", custom_objects={cls.__name__: cls})
    check_loaded(model, tmp_path)


class Autoencoder(keras.layers.Layer):
    """Made of other layers, with no config: Keras's raises an error."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder

    def call(self, x):
        return self.decoder(self.encoder(x))


def test_a_layer_that_was_given_layers_is_made_again_of_theirs():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((6,))
    parts = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(6)]
    model = keras.Model(inputs, keras.layers.Dense(2)(Autoencoder(*parts)(inputs)))
    with pytest.raises(NotImplementedError, match="get_config"):
        model.get_layer(index=1).get_config()
    new = keras_mp.export.in_precision(model, "float32")
    x = np.random.default_rng().normal(size=(5, 6)).astype("float32")
    hidden, *_, kernel, bias = model.get_weights()[:4], *model.get_weights()[4:]
    expected = np.tanh(x @ hidden[0] + hidden[1]) @ hidden[2] + hidden[3]
    np.testing.assert_allclose(new.predict(x, verbose=0), expected @ kernel + bias, rtol=1e-4, atol=1e-5)


def test_an_argument_is_kept_as_it_was_given_inside_dicts_and_lists_too():
    def made(rate=0.1):
        return {"rates": [rate, np.full(2, rate)], "name": "n"}

    assert same(made(), made())
    for other in (made(0.2), {"name": "n"}, [made()], None):
        assert not same(other, made()) and not same(made(), other)


class Described(keras.Model):
    """Its config says what it was made with, and more than it takes; no attribute does."""

    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x):
        return self.dense(self.norm(x))

    def get_config(self):
        return {"name": self.name, "trainable": True, "width": self.dense.units}


def test_a_model_with_a_config_needs_no_attributes(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    check_loaded(Described(3), tmp_path)
