"""revert gives back the model that was there before stabilize, convert and make_lean: of every kind, also loaded."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from promises.matrix import said
from twins import twin

import keras_mp
from keras_mp.rebuild.walk import notes_of, original_class

everything = {"select": lambda path, layer: True}


def small():
    x = inputs = keras.Input((8, 16))
    x = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = layers.Dense(32, "gelu", name="up")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(16, "softmax", name="head")(x))


def done(model):
    return {part.change for part in keras_mp.report(model).parts if part.done}


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore:convert")
@pytest.mark.parametrize("first", ["stabilize", "convert", "make_lean"])
def test_each_change_is_undone_alone(first):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = small()
    plain = said(model)
    changes = {
        "stabilize": keras_mp.stabilize,
        "convert": lambda one: keras_mp.convert(one, **everything),
        "make_lean": keras_mp.lean.make_lean,
    }
    others = {name: change for name, change in changes.items() if name != first}
    wanted = small()
    wanted.set_weights(model.get_weights())
    for change in others.values():
        change(wanted)
    for change in (changes[first], *others.values()):
        change(model)
    assert done(model) == set(changes)
    keras_mp.revert(model, first)
    assert done(model) == set(others)
    batch = np.random.default_rng().normal(size=(2, 8, 16)).astype("float32")
    np.testing.assert_array_equal(*(one(batch, training=False) for one in (model, wanted)))
    keras_mp.revert(model, *others)
    assert done(model) == set() and said(model) == plain


def test_an_inner_model_that_is_fed_float32_takes_16_bits_again():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inner_input = keras.Input((4,), dtype="bfloat16")
    inner = keras.Model(inner_input, inner_input * 2)
    inputs = keras.Input((4,))
    head = layers.Dense(4, "softmax")(inputs)
    model = keras.Model(inputs, [head, inner(head)])
    before = (said(model), [tensor.dtype for tensor in inner.inputs])
    keras_mp.stabilize(model)
    assert inner.inputs[0].dtype == "float32"
    keras_mp.revert(model)
    assert (said(model), [tensor.dtype for tensor in inner.inputs]) == before


def test_quantized_after_stabilize_it_stays_quantized():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16), layers.LayerNormalization(), layers.Dense(4)])
    plain = twin(model)
    keras_mp.stabilize(model).quantize("int8")
    keras_mp.revert(model)
    plain.quantize("int8")
    for one, other in zip(model.layers, plain.layers, strict=True):
        assert one.dtype_policy == other.dtype_policy
        assert [weight.dtype for weight in one.weights] == [weight.dtype for weight in other.weights]
    batch = np.random.default_rng().normal(size=(3, 16)).astype("float32")
    np.testing.assert_array_equal(model(batch), plain(batch))


@pytest.mark.jax
def test_a_regularizer_is_the_old_one():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, activity_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(3, "softmax"),
        ]
    )
    regularizer = model.layers[0].activity_regularizer
    keras_mp.stabilize(model)
    assert model.layers[0].activity_regularizer is not regularizer
    keras_mp.revert(model)
    assert model.layers[0].activity_regularizer is regularizer


def test_wrong_use():
    keras.config.set_dtype_policy("float32")
    model = small()
    with pytest.raises(ValueError, match=r"changes='stabilise' must be one of .* Did you mean 'stabilize'\?"):
        keras_mp.revert(model, "stabilise")
    with pytest.raises(ValueError, match="is not built"):
        keras_mp.revert(keras.Sequential([layers.Dense(2)]))
    assert original_class(model) is type(keras_mp.revert(model))


@pytest.mark.parametrize("change", [keras_mp.stabilize, lambda model: keras_mp.convert(model, **everything)])
@pytest.mark.filterwarnings("ignore:convert")
def test_an_inner_model_that_was_fed_float32_before_is_left_to_keras(change):
    """Keras casts what it is called on to its 16-bit input, and an operation there computes in 16 bits."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    inner_input = keras.Input((16,), dtype="bfloat16")
    inner = keras.Model(inner_input, layers.Dense(16)(layers.LayerNormalization()(inner_input * 3)))
    inputs = keras.Input((16,))
    model = keras.Model(inputs, layers.Dense(4)(inner(inputs)))
    change(model)
    assert inner.inputs[0].dtype == "bfloat16" and notes_of(inner.layers[0]) is None


@pytest.mark.jax
@pytest.mark.slow
def test_a_prepared_and_reverted_model_is_saved_as_keras_own(tmp_path):
    """A process without keras_mp loads it, and goes on: the step and Adam's moments are those of before."""
    x = np.random.default_rng().normal(size=(64, 4)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    models = {}
    for policy in ("mixed_float16", "mixed_bfloat16"):
        dense = {"dtype": policy}
        models[policy] = model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "gelu", **dense), layers.Dense(1, **dense)]
        )
        optimizer = keras.optimizers.Adam(1e-2)
        if policy == "mixed_float16":
            optimizer = keras_mp.LossScaleOptimizer(optimizer, initial_scale=8.0)
        keras_mp.prepare(model, optimizer, "mse", state_dtype=None if policy == "mixed_float16" else "bfloat16")
        model.fit(x, x[:, :1], batch_size=32, verbose=0)
        with pytest.raises(ValueError, match="cannot be saved as HDF5.*'.keras'"):
            model.save(tmp_path / "model.h5")
        moments = [keras.ops.convert_to_numpy(slot) for slot in model.optimizer.inner_optimizer._momentums]
        keras_mp.revert(model)
        plain = model.optimizer if policy == "mixed_bfloat16" else model.optimizer.inner_optimizer
        assert type(model) is keras.Sequential and type(plain) is keras.optimizers.Adam
        assert int(plain.iterations) == 2
        for old, new in zip(moments, plain._momentums, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(new), old)
        model.save(tmp_path / f"{policy}.keras")
        model.save(tmp_path / f"{policy}.h5")
    program = (
        "import sys, keras, numpy as np; x = np.load('x.npy')\n"
        f"for name in {[*models]}:\n"
        "    model = keras.models.load_model(f'{name}.keras')\n"
        "    model.fit(x, x[:, :1], batch_size=64, verbose=0, shuffle=False)\n"
        "    np.save(f'{name}.npy', model.get_weights()[0])\n"
        "assert 'keras_mp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": ""})
    for name, model in models.items():
        model.fit(x, x[:, :1], batch_size=64, verbose=0, shuffle=False)
        np.testing.assert_allclose(model.get_weights()[0], np.load(tmp_path / f"{name}.npy"), rtol=1e-5)
