"""Models with quantized weights and LoRA, rebuilt: nothing of them is rounded again, lost or thawed."""

import adapted_models
import keras
import keras_hub
import numpy as np
import pytest
from arrays import values
from keras import layers
from twins import twin

from keras_mp.precision.policy import set_global_policy
from keras_mp.rebuild.model import rebuild
from keras_mp.rebuild.quantized_policies import policy_of
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.stability.stabilized import stabilize

Int4 = keras.quantizers.Int4QuantizationConfig


def unchanged(model):
    new, unreached, _ = rebuild(model, lambda node, layer: node)
    assert unreached == ()
    return new


class Hidden(layers.Layer):
    """Creates its layers itself, as KerasHub's do: no config shows that they were quantized, or have LoRA."""

    def build(self, shape):
        self.inner = layers.Dense(6, dtype=self.dtype_policy, name="inner")
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_what_no_config_shows_is_carried_over(mode):
    generator = np.random.default_rng()
    model = keras.Sequential([keras.Input((16,)), Hidden(), layers.Dense(4, lora_rank=2, lora_alpha=6)])
    inner, head = model.layers[0].inner, model.layers[1]
    quantizer = keras.quantizers.AbsMaxQuantizer(axis=-1, value_range=(-20, 20))
    config = Int4(block_size=4) if mode == "int4" else keras.quantizers.Int8QuantizationConfig(None, quantizer)
    adapted_models.adapt(inner, mode, config, generator=generator)
    inner.bias.trainable = False
    new = unchanged(model)
    x = generator.normal(size=(3, 16)).astype("float32")
    np.testing.assert_array_equal(adapted_models.logits(new, x), adapted_models.logits(model, x))
    assert [v.path.split("/")[-1] for v in new.trainable_variables] == [
        v.path.split("/")[-1] for v in model.trainable_variables
    ]
    copy = new.layers[0].inner
    assert (copy.lora_alpha, new.layers[1].lora_alpha) == (adapted_models.ALPHA, head.lora_alpha)
    assert copy.quantization_mode == mode and copy.inputs_quantizer is inner.inputs_quantizer
    np.testing.assert_equal(values(copy.variables), values(inner.variables))


@pytest.mark.parametrize("mode", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_backbone_that_was_loaded_with_quantized_weights_is_rebuilt(mode):
    """A preset's config has one map of policies, which all layers share; these int4 groups are not Keras's default."""
    backbone = adapted_models.gemma("mixed_bfloat16", None, None).backbone
    config = Int4(block_size=32) if mode == "int4" else None
    backbone.quantize(mode, config=config)
    with set_global_policy("mixed_bfloat16"):
        loaded = type(backbone).from_config(backbone.get_config())
        for old, new in zip(backbone.weights, loaded.weights, strict=True):
            new.assign(old)
        loaded.enable_lora(2)
        model = keras_hub.models.GemmaCausalLM(backbone=loaded, preprocessor=None)
    policies = {part.path: part._dtype_policy for part in layers_by_path(model).values()}
    new = unchanged(model)
    assert {part.path: part._dtype_policy for part in layers_by_path(model).values()} == policies
    x = adapted_models.tokens()[0]
    np.testing.assert_array_equal(adapted_models.logits(new, x), adapted_models.logits(model, x))
    assert quantized_in(new) == quantized_in(model) != {}


def quantized_in(model):
    return {path: part.quantization_mode for path, part in layers_by_path(model).items() if part.quantization_mode}


def test_a_map_of_policies_in_which_it_is_itself():
    """Keras writes so where a layer is given the map that it shares as its new policy."""
    policies, inner = (keras.dtype_policies.DTypePolicyMap(name) for name in ("mixed_bfloat16", "float32"))
    policies["model/head"], inner["model/first"] = "int8_from_mixed_bfloat16", "int8_from_float32"
    policies["model/other"], policies["model/first"] = policies, inner
    found = {}
    for name in ("head", "other", "first"):
        layer = layers.Dense(2, name=name, dtype=policies)
        layer._path = f"model/{name}"
        found[name] = policy_of(layer).name
    assert found == {"head": "int8_from_mixed_bfloat16", "other": "mixed_bfloat16", "first": "int8_from_float32"}


def test_a_policy_whose_name_was_erased_has_it_again():
    layer = layers.Dense(2, dtype="int8_from_mixed_bfloat16")
    layer.dtype_policy._name = None  # as a backbone of KerasHub leaves it behind where its config was read
    assert policy_of(layer).name == "int8_from_mixed_bfloat16"


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_a_stabilized_dense_head_gives_float32_of_its_quantized_weights(mode):
    generator = np.random.default_rng()
    with set_global_policy("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((32,)), layers.Dense(8)])
    kernel = adapted_models.known_kernel((32, 8), "int8" if mode == "int8" else "int4 in groups", generator)
    model.layers[0].set_weights([kernel, np.zeros(8)])
    adapted_models.adapt(model.layers[0], mode, Int4(block_size=8) if mode == "int4" else None, generator=generator)
    layer = model.layers[0]
    a, b = (keras.ops.convert_to_numpy(v).astype("float64") for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    x = generator.integers(-4, 5, (5, 32)).astype("float32")  # exact in bfloat16
    expected = x.astype("float64") @ (kernel + adapted_models.ALPHA / adapted_models.RANK * a @ b)
    outputs = stabilize(twin(model))(x)
    assert keras.backend.standardize_dtype(outputs.dtype) == "float32"
    # int8 rounds each input to a 127th of the row's largest, by at most half a step, and adds 32 such products.
    bound = 1e-5 * abs(expected).max() if mode == "int4" else 32 * 0.5 / 127 * 4
    assert abs(np.asarray(keras.ops.convert_to_numpy(outputs)) - expected).max() <= bound
