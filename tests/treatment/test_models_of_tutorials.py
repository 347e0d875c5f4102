"""25 models as tutorials write them: prepared, each trains as in plain Keras, and in 16 bits nearly so."""

import functools
import warnings
from typing import NamedTuple

import keras
import numpy as np
import pytest
import random_seed
import strangers

import keras_mp

QUICK = {"own_train_step", "distilled", "lambdas", "graph_in_init"}
ON_JAX = {"own_train_step", "distilled"}  # whose step is code of their own, another on each backend
# What plain Keras itself saves and loads.
SAVED = {"own_train_step", "sparse_autoencoder", "in_two_models", "translator", "tagger", "u_net", "augmented"}
IN_FLOAT16 = {"sparse_autoencoder", "siamese", "translator", "tagger", "dict_of_tasks", "stochastic_depth"}
STEPS = 3
# Of the length of what is compared.
NEAR = {"mixed_bfloat16": (0.03, 0.02, 0.15), "mixed_float16": (0.005, 0.005, 0.02)}


def marked(names, quick, *more):
    return [pytest.param(name, *more, marks=marks(name in quick, name in ON_JAX)) for name in names]


def marks(quick, on_jax):
    """A slow test runs on both backends; a quick one on JAX where the code is another there."""
    return [] if quick and not on_jax else [pytest.mark.jax] if quick else [pytest.mark.jax, pytest.mark.slow]


class Trained(NamedTuple):
    model: keras.Model
    x: object
    outputs: list  # before training
    losses: list
    weights: list
    moved: list  # by the training


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def predicted(model, x):
    model = model.critic if isinstance(model, strangers.Adversaries) else model
    return [np.asarray(y, "float32") for y in keras.tree.flatten(model.predict(x, batch_size=64, verbose=0))]


def still(model):
    """Lets dropout draw nothing: in 16 bits Keras draws other masks."""
    for layer in model._flatten_layers():
        for name in ("rate", "stddev"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)


def trained(name, policy, prepared, draws=True):
    keras.config.set_dtype_policy(policy)
    seed = int(np.random.default_rng(random_seed.of_a_test(name)).integers(2**31))
    keras.utils.set_random_seed(seed)
    model, x, y, settings = strangers.MODELS[name](np.random.default_rng(seed))
    if not draws:
        still(model)
    before = [numpy(weight) for weight in model.weights]
    own = type(model).compile is not keras.Model.compile
    # JAX compiles a loop anew each time that it is not jitted.
    how = {} if own else {"run_eagerly": True} if strangers.TENSORFLOW else {"jit_compile": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a layer that stabilize cannot see.*")
        if not prepared:
            model.compile(**settings, **how)
        elif "optimizer" in settings:
            assert keras_mp.prepare(model, **settings, **how) is model
        else:
            assert keras_mp.stabilize(model) is model
            model.compile(**settings, **how)
    if own:
        model.run_eagerly = strangers.TENSORFLOW
    outputs = predicted(model, x)
    history = model.fit(x, y, batch_size=64, epochs=STEPS, shuffle=False, verbose=0).history
    losses = [np.array(values) for key, values in history.items() if "loss" in key]
    weights = [numpy(weight) for weight in model.weights]
    moved = [after - value for after, value in zip(weights, before, strict=True)]
    assert any(np.any(by) for by, weight in zip(moved, model.weights, strict=True) if weight.trainable)
    return Trained(model, x, outputs, losses, weights, moved)


@functools.cache
def plain(name, draws):
    return trained(name, "float32", False, draws)[2:]


def off(actual, expected):
    """How far some arrays are from others, of the length of these."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    actual, expected = (np.concatenate([x.astype("float64").ravel() for x in each]) for each in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", marked(strangers.MODELS, QUICK))
def test_in_float32_it_is_what_plain_keras_trains(name):
    for actual, expected in zip(trained(name, "float32", True)[2:], plain(name, True), strict=True):
        assert off(actual, expected) < 1e-6


IN_16_BITS = [
    *(
        pytest.param(name, "mixed_bfloat16", marks=marks(name in QUICK, name == "distilled"))
        for name in strangers.MODELS
    ),
    *(pytest.param(name, "mixed_float16", marks=marks(False, True)) for name in sorted(IN_FLOAT16)),
]


@pytest.mark.parametrize("name, policy", IN_16_BITS)
def test_in_16_bits_it_is_near(name, policy):
    actual = trained(name, policy, True, draws=False)[2:]
    expected = plain(name, False)
    outputs, losses, moved = NEAR[policy]
    assert off(actual[0], expected[0]) < outputs
    assert off(actual[1], expected[1]) < losses
    assert off(actual[3], expected[3]) < moved


@pytest.mark.parametrize("name", marked(sorted(SAVED), QUICK))
def test_saved_and_loaded_it_is_the_same(name, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, x, *_ = strangers.MODELS[name](np.random.default_rng())
    keras_mp.stabilize(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=strangers.CLASSES, compile=False)
    for actual, expected in zip(predicted(loaded, x), predicted(model, x), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_compile_of_its_own_is_called_with_what_it_takes():
    model, _, _, settings = strangers.MODELS["distilled"](np.random.default_rng())
    keras_mp.prepare(model, **settings)
    assert model.temperature == 3.0 and model.share == 0.3


def test_a_compile_of_its_own_that_cannot_be_called_leaves_the_model_as_it_is():
    model, _, _, settings = strangers.MODELS["adversaries"](np.random.default_rng())
    with pytest.raises(TypeError, match="Adversaries cannot be called.*'critic_optimizer'.*call keras_mp.stabilize"):
        keras_mp.prepare(model, "adam", "mse")
    model, _, _, settings = strangers.MODELS["distilled"](np.random.default_rng())
    with pytest.raises(TypeError, match="compile.. of Student cannot be called by prepare: .*'hard_loss'"):
        keras_mp.prepare(model, "adam", "mse")
    assert not model.compiled


@pytest.mark.jax
def test_a_step_by_hand_that_does_not_scale_its_loss_is_named_in_float16():
    """Keras says nothing, and makes updates that are smaller by the loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    model, x, y, settings = strangers.MODELS["own_train_step"](np.random.default_rng())
    keras_mp.prepare(model, **settings)
    with pytest.warns(UserWarning, match=r"never multiplied a loss by it.*take the gradients of optimizer"):
        model.train_on_batch(x, y)


def test_a_block_without_kwargs_is_reloaded_though_keras_cannot(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((5, 16))
    hidden = strangers.EncoderBlock(16, 2, 32)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(hidden))
    model.save(tmp_path / "plain.keras")
    with pytest.raises(TypeError, match="unexpected keyword argument 'trainable'"):
        keras.saving.load_model(tmp_path / "plain.keras", custom_objects=strangers.CLASSES)
    keras_mp.stabilize(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=strangers.CLASSES)
    for weight, expected in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numpy(weight), numpy(expected))
    x = np.random.default_rng().normal(size=(3, 5, 16)).astype("float32")
    np.testing.assert_array_equal(predicted(loaded, x)[0], predicted(model, x)[0])


def test_a_class_that_is_not_registered_is_cloned_as_by_plain_keras():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((6, 8))
    hidden = keras.layers.LayerNormalization()(strangers.HandWrittenAttention(8)(inputs))
    block = strangers.EncoderBlock(8, 2, 16)
    model = keras_mp.stabilize(keras.Model(inputs, keras.layers.Dense(2)(block(hidden))))
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    x = np.random.default_rng().normal(size=(4, 6, 8)).astype("float32")
    np.testing.assert_array_equal(predicted(other, x)[0], predicted(model, x)[0])


def test_activations_that_are_lambdas_come_into_another_precision():
    """Keras writes a lambda as bytecode, which it does not read as an activation."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, x, *_ = strangers.MODELS["lambdas"](np.random.default_rng())
    new = keras_mp.export.in_precision(keras_mp.stabilize(model), "float32")
    np.testing.assert_allclose(predicted(new, x)[0], predicted(model, x)[0], atol=0.05)
