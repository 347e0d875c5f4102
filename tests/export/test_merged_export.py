"""export_float32 of quantized weights and LoRA: one dequantized, merged matrix a layer."""

import adapted_models
import keras
import numpy as np
import pytest
from exported import served
from keras import layers

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.export.verification import ExportError
from keras_mp.precision.policy import set_global_policy

pytestmark = pytest.mark.usefixtures("float32_policy")

Int4 = keras.quantizers.Int4QuantizationConfig
# Of float32 sums of 32 products, and of Keras's epsilon of 1e-7 in the scale of int8 and int4.
ROUNDING = 1e-5


def dense(mode, config, policy, generator):
    """A Dense layer of 32 by 12 whose weights, quantized and merged, are known; and these in float64."""
    with set_global_policy(policy):
        model = keras.Sequential([keras.Input((32,)), layers.Dense(12, name="head")])
    layer = model.get_layer("head")
    grouped = config is not None and config.block_size > 0
    kernel = adapted_models.known_kernel((32, 12), "int4 in groups" if grouped else mode, generator)
    bias = generator.normal(size=12).astype("float32")
    layer.set_weights([kernel, bias])
    adapted_models.adapt(layer, mode, config, generator=generator)
    a, b = (keras.ops.convert_to_numpy(v).astype("float64") for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    return model, kernel + adapted_models.ALPHA / adapted_models.RANK * a @ b, bias


@pytest.mark.parametrize(
    ("mode", "config", "policy"),
    [
        ("int4", Int4(block_size=8), "mixed_bfloat16"),
        pytest.param("int4", Int4(block_size=-1), "mixed_float16", marks=[pytest.mark.slow, pytest.mark.rare]),
        pytest.param("int8", None, "mixed_bfloat16", marks=pytest.mark.slow),
    ],
    ids=["int4 in groups", "int4", "int8"],
)
def test_a_merged_dense_layer_computes_what_the_known_weights_do(mode, config, policy, tmp_path):
    generator = np.random.default_rng()
    model, kernel, bias = dense(mode, config, policy, generator)
    x = generator.normal(size=(5, 32)).astype("float32")
    report = keras_mp.export_float32(model, tmp_path / "exported", x)
    expected = x.astype("float64") @ kernel + bias
    assert abs(served(tmp_path / "exported", x) - expected).max() <= ROUNDING * abs(expected).max()
    assert report.low_precision_ops == 0 and report.max_difference <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, equation",
    [
        ("int8", "abde,dec->abc"),
        *(pytest.param("int4", equation, marks=pytest.mark.rare) for equation in ("abc,cde->abde", "abc,dce->abde")),
    ],
)
def test_the_merged_kernel_of_an_einsum_is_what_keras_multiplies_by(mode, equation):
    """Unit vectors through Keras's own quantized product are the rows of its kernel."""
    generator = np.random.default_rng()
    sizes = {"a": 1, "b": 1, "c": 6, "d": 2, "e": 4}
    operands, result = equation.split("->")
    shape = [sizes[label] for label in operands.split(",")[0]]
    # (..., as in attention: queries, the output, and Gemma's heads-first queries)
    layer = layers.EinsumDense(equation, [sizes[label] for label in result[1:]])
    units = np.eye(int(np.prod(shape)), dtype="float32").reshape(-1, *shape[1:])[: np.prod(shape)]
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    adapted_models.adapt(layer, mode, Int4(block_size=3) if mode == "int4" else None, generator=generator)
    layer.inputs_quantizer = None
    quantized = adapted_models.logits(model, units)
    merged = adapted_models.logits(merged_float32(model), units)
    assert abs(merged - quantized).max() <= ROUNDING * abs(quantized).max() and abs(quantized).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode, tied", [("int4", True), ("int8", False)], ids=["tied", "untied"])
def test_the_merged_tables_of_an_embedding_are_what_keras_looks_up_and_multiplies_by(mode, tied):
    layer = layers.ReversibleEmbedding(10, 6, tie_weights=tied)
    layer.build()
    layer.quantize(mode, config=Int4(block_size=4) if mode == "int4" else None)
    layer.inputs_quantizer = None
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, layer(layer(inputs), reverse=True))
    x = np.arange(10)[None]
    expected = adapted_models.logits(model, x)
    merged = adapted_models.logits(merged_float32(model), x)
    assert abs(merged - expected).max() <= ROUNDING * abs(expected).max() and abs(expected).max() > 0


def test_lora_of_a_convolution_is_merged(tmp_path):
    generator = np.random.default_rng()
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(4, 3, name="conv")])
    adapted_models.adapt(model.get_layer("conv"), None, generator=generator)
    x = generator.normal(size=(2, 6, 6, 3)).astype("float32")
    expected = adapted_models.logits(model, x)
    keras_mp.export_float32(model, tmp_path / "exported", x)
    assert abs(served(tmp_path / "exported", x) - expected).max() <= ROUNDING * abs(expected).max()
    assert not any("lora" in v.path for v in merged_float32(model).variables)


@keras.saving.register_keras_serializable("tests")
class OwnLora(layers.Layer):
    """Has arguments and attributes that are called as those of Keras's LoRA."""

    def __init__(self, lora_rank, **options):
        super().__init__(**options)
        self.lora_rank, self.lora_enabled = lora_rank, True

    def build(self, shape):
        self.a = self.add_weight((shape[-1], self.lora_rank))
        self.b = self.add_weight((self.lora_rank, shape[-1]))

    def call(self, x):
        return x + x @ self.a @ self.b

    def get_config(self):
        return {**super().get_config(), "lora_rank": self.lora_rank}


def test_a_layer_with_a_lora_of_its_own_stays_as_it_is():
    model = keras.Sequential([keras.Input((8,)), OwnLora(2), layers.Dense(3)])
    model.layers[1].enable_lora(2)
    x = np.random.default_rng().normal(size=(2, 8)).astype("float32")
    merged = merged_float32(model)
    np.testing.assert_allclose(adapted_models.logits(merged, x), adapted_models.logits(model, x), atol=1e-6)
    assert merged.layers[0].lora_rank == 2 and not merged.layers[1].lora_enabled


def test_a_tied_quantized_embedding_with_lora_is_refused(tmp_path):
    """Keras adds LoRA's product where the embedding is looked up, and not where it makes logits."""
    layer = layers.ReversibleEmbedding(10, 6, name="embedding")
    layer.build()
    adapted_models.adapt(layer, "int8")
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, layer(layer(inputs), reverse=True))
    with pytest.raises(ExportError, match="'embedding' .*adds LoRA's product to the embeddings and not to the logits"):
        keras_mp.export_float32(model, tmp_path / "exported")


def test_a_layer_that_is_not_calibrated_yet_is_named(tmp_path):
    model = keras.Sequential([keras.Input((32,)), layers.Dense(8, name="quantized")])
    config = keras.quantizers.GPTQConfig(dataset=None, tokenizer=None, group_size=8)
    model.get_layer("quantized").quantize("gptq", config=config)
    with pytest.raises(ExportError, match="layer 'quantized' .*not calibrated it for 'gptq' yet"):
        keras_mp.export_float32(model, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []
