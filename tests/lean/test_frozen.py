"""A frozen base in the 16 bits in which it is read: the same losses and updates, bit for bit."""

import causal_models
import keras
import ml_dtypes
import numpy as np
import pytest
from arrays import values
from keras import layers
from twins import twin

import keras_mp
from keras_mp.rebuild.walk import layers_by_path

TENSORFLOW = keras.backend.backend() == "tensorflow"
WITHOUT_DROPOUT = {"LlamaCausalLM": {}, "GPT2CausalLM": {"dropout": 0.0}}


def with_lora(family, policy="mixed_bfloat16"):
    keras.config.set_dtype_policy(policy)
    model = causal_models.build(family, num_layers=1, **WITHOUT_DROPOUT[family])
    model.backbone.enable_lora(rank=2)
    random = np.random.default_rng()
    for weight in model.trainable_variables:  # LoRA's second matrix begins as zeros
        weight.assign(random.normal(size=weight.shape) * 0.1)
    return model


def batch():
    text = np.random.default_rng().integers(1, causal_models.VOCABULARY, (4, 9))
    return {"token_ids": text[:, :-1], "padding_mask": np.ones((4, 8), "int32")}, text[:, 1:]


def prepared(model, narrow, **arguments):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(model, keras.optimizers.Adam(1e-2), loss, narrow_frozen=narrow, **arguments)


def dtypes(model):
    return {
        f"{path}/{v.name}": v.dtype for path, layer in layers_by_path(model).items() for v in layer._trainable_variables
    }


@pytest.mark.jax
@pytest.mark.parametrize(
    ("family", "lean", "eager"),
    [
        ("GPT2CausalLM", False, True),
        ("LlamaCausalLM", True, True),
        pytest.param("GPT2CausalLM", True, False, marks=pytest.mark.slow),
    ],
)
def test_losses_and_updates_are_the_same_bits(family, lean, eager):
    model = with_lora(family)
    other = twin(model)
    if lean:
        keras_mp.lean.make_lean(model)
        keras_mp.lean.make_lean(other)
    x, y = batch()
    how = {"run_eagerly": True} if TENSORFLOW and eager else {}  # where that takes a tenth of the time
    prepared(model, True, **how)
    prepared(other, False, **how)
    narrow = [v for v in model.non_trainable_variables if v.dtype == "bfloat16"]
    assert sum(np.prod(v.shape) for v in narrow) > 0.8 * sum(np.prod(v.shape) for v in model.non_trainable_variables)
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    for _ in range(3):
        assert model.train_on_batch(x, y) == other.train_on_batch(x, y)
    np.testing.assert_equal(values(model.trainable_variables), values(other.trainable_variables))
    np.testing.assert_array_equal(model.predict(x, verbose=0), other.predict(x, verbose=0))


def test_undone_it_is_float32_without_the_low_bits():
    model = with_lora("LlamaCausalLM")
    before = {v.path: value for v, value in zip(model.weights, values(model.weights), strict=True)}
    dtypes_before = [v.dtype for v in model.weights]
    keras_mp.stabilize(model)
    assert keras_mp.lean.narrow_frozen(model) is model
    once = dtypes(model)
    assert "bfloat16" in once.values() and dtypes(keras_mp.lean.narrow_frozen(model)) == once
    narrow = {v.path for v in model.weights if v.dtype == "bfloat16"}
    keras_mp.revert(model, "make_lean")
    assert [v.dtype for v in model.weights] == dtypes_before
    for variable, value in zip(model.weights, values(model.weights), strict=True):
        rounded = value.astype(ml_dtypes.bfloat16) if variable.path in narrow else before[variable.path]
        np.testing.assert_array_equal(value, rounded)


@pytest.mark.parametrize("how", ["cloned", "weights"])
def test_it_comes_back(how, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8, 8, 3))
    features = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(inputs))
    base = keras.Model(inputs, layers.Dense(6)(features), name="base")
    base.trainable = False
    model = keras.Model(inputs, layers.Dense(2)(base(inputs)))
    keras_mp.lean.narrow_frozen(keras_mp.stabilize(model))
    x = np.random.default_rng().normal(size=(3, 8, 8, 3)).astype("float32")
    if how == "cloned":
        again = keras.models.clone_model(model)
        again.set_weights(model.get_weights())
    else:
        again = keras.models.clone_model(keras_mp.revert(keras.models.clone_model(model), "make_lean"))
        model.save_weights(tmp_path / "model.weights.h5")
        again.load_weights(tmp_path / "model.weights.h5")
    assert dtypes(again) == (dict.fromkeys(dtypes(model), "float32") if how == "weights" else dtypes(model))
    assert set(dtypes(model).values()) == {"float16", "float32"}
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.skipif(not TENSORFLOW, reason="the merged weights are the same; TensorFlow exports in this process")
def test_a_merged_export_adds_lora_to_the_rounded_kernel(tmp_path):
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_bfloat16")
    generator = np.random.default_rng()
    model = keras.Sequential([keras.Input((32,)), layers.Dense(12), layers.Dense(4)])
    for layer in model.layers:
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(generator.normal(size=layer.lora_kernel_b.shape))
    keras_mp.lean.narrow_frozen(model)
    assert model.layers[0]._kernel.dtype == "bfloat16"
    x = generator.normal(size=(5, 32)).astype("float32")
    expected = x.astype("float64")
    for layer in model.layers:
        kernel, a, b, bias = (
            keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")).astype("float64")
            for v in (layer._kernel, layer.lora_kernel_a, layer.lora_kernel_b, layer.bias)
        )
        expected = expected @ (kernel + layer.lora_alpha / layer.lora_rank * a @ b) + bias
    keras_mp.export_float32(model, tmp_path / "exported", x)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    served = np.asarray(loaded.serve(tf.constant(x)))
    # Float32 sums of 32 products.
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.jax
def test_an_unfrozen_layer_has_float32_weights_until_it_is_frozen_again():
    keras.config.set_dtype_policy("mixed_bfloat16")
    base = keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(8)])
    base.trainable = False
    model = keras.Sequential([keras.Input((4,)), base, layers.Dense(2)])
    keras_mp.prepare(model, "sgd", "mse", narrow_frozen=True)
    assert [v.dtype for v in base.weights] == ["bfloat16"] * 4
    base.layers[-1].trainable = True
    assert [v.dtype for v in base.weights] == ["bfloat16"] * 2 + ["float32"] * 2
    keras_mp.prepare(model, keras.optimizers.SGD(1e-4), "mse")
    before = values(base.weights)
    x = np.random.default_rng().normal(size=(16, 4)).astype("float32")
    model.fit(x, x[:, :2], verbose=0)
    moved = [bool(np.any(a != b)) for a, b in zip(before, values(base.weights), strict=True)]
    assert moved == [False, False, True, True]
    base.layers[-1].trainable = False
    assert [v.dtype for v in base.weights] == ["bfloat16"] * 4


def test_what_is_read_in_float32_or_trains_stays_as_it_is():
    class Own(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],))

        def call(self, x):
            return x * keras.ops.cast(self.scale, x.dtype)

    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((4,))
    x = layers.LayerNormalization()(Own()(layers.Dense(4, dtype="float32")(inputs)))
    model = keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(layers.Dense(4, name="trains")(x))))
    for layer in model.layers:
        layer.trainable = layer.name == "trains"
    keras_mp.lean.narrow_frozen(keras_mp.stabilize(model))
    output = model.layers[-1]
    assert [v for v in model.weights if v.dtype == "bfloat16"] == [output.kernel]
    with pytest.raises(ValueError, match="no weight is both frozen and read only in 16 bits. '.*dense.*' trains"):
        keras_mp.lean.narrow_frozen(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    with pytest.raises(ValueError, match="is not built"):
        keras_mp.lean.narrow_frozen(keras.Sequential([layers.Dense(2)]))


def test_a_frozen_weight_that_is_quantized_is_quantized_from_what_it_was_stored_as():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(16), layers.Dense(2)])
    model.layers[0].trainable = False
    keras_mp.lean.narrow_frozen(keras_mp.stabilize(model))
    other = keras.Sequential([keras.Input((32,)), layers.Dense(16), layers.Dense(2)])
    other.set_weights(values(model.weights))
    model.layers[0].quantize("int8")
    other.layers[0].quantize("int8")
    np.testing.assert_equal(values(model.layers[0].weights), values(other.layers[0].weights))
