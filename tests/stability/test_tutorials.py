"""Models as tutorials write them, stabilized: trained in mixed_float16, saved and reloaded where plain Keras can."""

import warnings

import keras
import numpy as np
import pytest
import tutorials
from keras import layers

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers


@pytest.fixture(autouse=True)
def mixed_float16(float32_policy):
    keras.config.set_dtype_policy("mixed_float16")


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def assert_equal_weights(model, other):
    for weight, others in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(numpy(weight), numpy(others))


def stabilized(model):
    """The stabilized model, which nothing must be missing from but the output of a model that shows no order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*could not reach.*(weight|compile)")
        return keras_mp.stabilize(model)


@pytest.mark.parametrize("name", tutorials.MODELS)
@pytest.mark.slow
def test_a_tutorials_model_is_stabilized_and_trained(name):
    if not tutorials.TENSORFLOW and name in tutorials.ONLY_ON_TENSORFLOW:
        pytest.skip("its train_step takes TensorFlow's tape")
    model, x, y = tutorials.MODELS[name]()
    assert sensitive_layers(model)
    before = [numpy(weight) for weight in model.weights]
    new = stabilized(model)
    new.run_eagerly = tutorials.TENSORFLOW
    assert sensitive_layers(new) == [] and new.compiled
    for weight, value in zip(new.weights, before, strict=True):
        np.testing.assert_array_equal(numpy(weight), value)
    # Long enough for a loss scale that begins too high: each step that overflows halves it and changes nothing else.
    history = new.fit(x, y, batch_size=8, epochs=6, verbose=0).history
    assert np.isfinite([value for values in history.values() for value in values]).all()
    assert any(np.any(value != numpy(weight)) for value, weight in zip(before, new.weights, strict=True))


def test_the_two_optimizers_of_a_gan_stay():
    if not tutorials.TENSORFLOW:
        pytest.skip("its train_step takes TensorFlow's tape")
    model, x, _ = tutorials.adversarial()
    model.run_eagerly = True
    model.train_on_batch(x)
    optimizers = [model.d_optimizer, model.g_optimizer]
    new = stabilized(model)
    assert [new.d_optimizer, new.g_optimizer] == optimizers and int(new.d_optimizer.iterations) == 1
    assert new.generator(np.ones((2, 4), "float32")).dtype == "float32"
    assert new.discriminator(x).dtype == "float32"


@pytest.mark.parametrize("name", ["own_train_step", "subclassed"])
def test_a_tutorials_model_is_reloaded(name, tmp_path):
    if not tutorials.TENSORFLOW and name in tutorials.ONLY_ON_TENSORFLOW:
        pytest.skip("its train_step takes TensorFlow's tape")
    model, x, _ = tutorials.MODELS[name]()
    new = stabilized(model)
    new.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=tutorials.CLASSES)
    assert loaded.name == model.name and loaded.dtype_policy.name == "mixed_float16"
    assert_equal_weights(new, loaded)
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(new(x)))


def test_a_block_without_kwargs_is_reloaded_though_keras_cannot(tmp_path):
    inputs = keras.Input((5, 16))
    model = keras.Model(inputs, layers.Dense(2, "softmax")(tutorials.TransformerBlock(16, 2, 32)(inputs)))
    model.save(tmp_path / "plain.keras")
    with pytest.raises(TypeError, match="unexpected keyword argument 'trainable'"):
        keras.saving.load_model(tmp_path / "plain.keras", custom_objects=tutorials.CLASSES)
    new = stabilized(model)
    new.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=tutorials.CLASSES)
    assert_equal_weights(new, loaded)
    x = np.random.default_rng().normal(size=(3, 5, 16)).astype("float32")
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(new(x)))


class Times(layers.Layer):
    """A layer that is made of a function."""

    def __init__(self, rate, function):
        super().__init__()
        self.rate, self.function = rate, function
        self.norm = layers.LayerNormalization()

    def call(self, x):
        return self.norm(self.function(x) * self.rate)


def around(layer):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="head")(layer(inputs)))


def test_a_layer_that_is_made_of_a_function():
    model = around(Times(0.25, keras.ops.square))
    x = np.random.default_rng().normal(size=(3, 4)).astype("float32")
    before = numpy(model(x))
    np.testing.assert_allclose(numpy(stabilized(model)(x)), before, rtol=2e-2, atol=2e-3)


def test_a_frozen_layer_inside_another_stays_frozen():
    block = tutorials.TransformerBlock(16, 2, 32)
    inputs = keras.Input((5, 16))
    model = keras.Model(inputs, layers.Dense(2)(block(inputs)))
    block.att.trainable = False
    before = [weight.trainable for weight in model.weights]
    new = stabilized(model)
    assert [weight.trainable for weight in new.weights] == before
    assert len(new.trainable_weights) == 10 and len(new.weights) - 10 >= 8


def test_policies_protect_moving_statistics():
    """One step: the statistics after it, against NumPy in float64."""
    keras.utils.clear_session()
    float32 = {"norm": keras.DTypePolicy("float32")}
    keras.config.set_dtype_policy(keras.dtype_policies.DTypePolicyMap("mixed_float16", float32))
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.99, name="norm")])
    start = np.float32(1.0) + np.float32(1e-4) * np.arange(1, 5, dtype="float32")
    model.layers[0].moving_mean.assign(start)
    x = np.random.default_rng().integers(-8, 8, (64, 4)).astype("float32") / 8
    model(x, training=True)
    exact = start.astype("float64") * 0.99 + x.astype("float64").mean(0) * 0.01
    np.testing.assert_allclose(numpy(model.layers[0].moving_mean), exact, rtol=0, atol=1e-6)
