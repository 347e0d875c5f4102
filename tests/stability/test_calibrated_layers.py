"""Layers that Keras quantized by GPTQ and AWQ: their float weights, LoRA beside them, files and exports."""

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.quantizers.awq import AWQ
from keras.src.quantizers.gptq import GPTQ
from twins import twin

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.rebuild.model import rebuild

LAYERS = {
    "dense": lambda: layers.Dense(9, "tanh", name="quantized"),
    "einsum": lambda: layers.EinsumDense("ab,bcd->acd", (3, 5), bias_axes="cd", name="quantized"),
    "einsum, two axes summed": lambda: layers.EinsumDense("abc,bcd->ad", 31, name="quantized"),
}
ROWS = {"dense": (13,), "einsum": (13,), "einsum, two axes summed": (5, 4)}


def config_of(mode, bits=4, group=-1, **options):
    made = keras.quantizers.GPTQConfig if mode == "gptq" else keras.quantizers.AWQConfig
    return made(**{"dataset": None, "tokenizer": None} | options, weight_bits=bits, group_size=group)


def calibrate(layer, config):
    """Quantizes a layer on random inputs of different sizes, as Keras does it with each layer of a block."""
    generator = np.random.default_rng()
    layer.quantize(config.mode, config=config)
    algorithm = (GPTQ if config.mode == "gptq" else AWQ)(layer, config)
    x = generator.normal(size=(64, int(algorithm.rows))) * np.exp2(generator.uniform(-3, 3, int(algorithm.rows)))
    if config.mode == "gptq":
        algorithm.update_hessian_with_batch(x.astype("float32"))
        algorithm.quantize_and_correct_layer()
    else:
        algorithm.update_activation_magnitudes(x.astype("float32"))
        algorithm.quantize_layer()


def outputs(model, x):
    return keras.ops.convert_to_numpy(model(x, training=False)).astype("float64")


CASES = [
    ("dense", "gptq", 4, 4, {}),
    ("dense", "gptq", 8, -1, {"symmetric": True}),
    ("einsum", "gptq", 3, 8, {"activation_order": True}),
    pytest.param("einsum", "awq", 4, -1, {}, marks=pytest.mark.jax),
    ("einsum, two axes summed", "gptq", 2, 7, {}),
]


@pytest.mark.parametrize("kind, mode, bits, group, options", CASES)
def test_lora_beside_calibrated_weights(kind, mode, bits, group, options, tmp_path):
    """What Keras's own layer computes, and LoRA's product in float64; saved, rebuilt, merged, and its gradients."""
    generator = np.random.default_rng()
    layer = LAYERS[kind]()
    before = layers.Dense(ROWS[kind][-1], use_bias=False)
    model = keras.Sequential([keras.Input(ROWS[kind]), before, layer])
    calibrate(layer, config_of(mode, bits, group, **options))
    x = generator.normal(size=(6, *ROWS[kind])).astype("float32")
    kept, layer.activation = layer.activation, keras.activations.linear
    own = outputs(model, x)  # by Keras
    np.testing.assert_allclose(outputs(merged_float32(model), x), own, atol=1e-5 * np.abs(own).max())
    codes = [keras.ops.convert_to_numpy(v) for v in layer.non_trainable_variables]

    keras_mp.stabilize(model)
    layer.enable_lora(2, lora_alpha=6)
    for variable in (layer.lora_kernel_a, layer.lora_kernel_b):
        variable.assign(generator.normal(size=variable.shape))
    a, b = (keras.ops.convert_to_numpy(v).astype("float64") for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    hidden = outputs(before, x)
    equation = getattr(layer, "equation", "ab,bc->ac")
    product = np.einsum(equation, hidden, 3 * np.einsum("...r,rz->...z", a, b))
    expected = np.tanh(own + product) if kind == "dense" else own + product
    layer.activation = kept
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    copy = rebuild(model, lambda node, layer: node).model
    merged = merged_float32(model)
    keras_mp.revert(model)  # leaves what Keras would compute without LoRA
    for other in (model, loaded, copy, merged):
        np.testing.assert_allclose(outputs(other, x), expected, atol=2e-5 * np.abs(own + product).max())
    assert [v.path.split("/")[-1] for v in loaded.trainable_variables] == [
        v.path.split("/")[-1] for v in model.trainable_variables
    ]
    for variable, value in zip(loaded.get_layer("quantized").non_trainable_variables, codes, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)

    # The gradient of what comes before, against that of the merged floats.
    y = generator.normal(size=expected.shape).astype("float32")
    changes = []
    for other in (twin(model), merged):
        start = keras.ops.convert_to_numpy(other.layers[0].kernel)
        other.compile(keras.optimizers.SGD(1.0), "mse")
        other.train_on_batch(x, y)
        changes.append(keras.ops.convert_to_numpy(other.layers[0].kernel) - start)
    np.testing.assert_allclose(*changes, atol=1e-4 * np.abs(changes[1]).max())
    assert np.abs(changes[1]).max() > 0


@pytest.mark.slow  # of int4: test_more_groups_than_16_bits_can_count
def test_groups_keep_their_scales_in_16_bits():
    """GPTQ numbers groups with fractions, such as 303 / 8, which Keras rounds up in bfloat16 to other groups."""
    with keras_mp.set_global_policy("mixed_bfloat16"):
        layer, end = layers.Dense(6, use_bias=False), layers.Dense(6, use_bias=False)
        model = keras.Sequential([keras.Input((320,)), layer, end])
    end.set_weights([np.eye(6)])
    scales = np.exp2(np.random.default_rng().integers(-6, 7, (40, 1))).repeat(8, axis=0)
    layer.set_weights([np.random.default_rng().normal(size=(320, 6)) * scales])
    calibrate(layer, config_of("gptq", group=8))
    x = np.eye(320, dtype="float32")
    expected = outputs(merged_float32(model), x)
    try:
        assert not np.allclose(outputs(model, x), expected, rtol=2**-6)
    except Exception as error:
        assert "is not in [0, " in str(error)  # TensorFlow checks that an index is one
    np.testing.assert_allclose(outputs(keras_mp.stabilize(model), x), expected, rtol=2**-6)


@pytest.mark.slow
def test_a_quantized_language_model_is_loaded_trained_and_exported(tmp_path):
    """By Keras's own `model.quantize`."""
    generator = np.random.default_rng()
    table = layers.Embedding(20, 12)
    blocks = [layers.Dense(15, "gelu"), layers.EinsumDense("abc,cd->abd", (None, 11), bias_axes="d"), layers.Dense(20)]
    with keras_mp.set_global_policy("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((8,), dtype="int32"), table, *blocks])
    tokens = generator.integers(0, 20, (4, 9))
    # Not in the config: Keras would save the layers in each layer's own config.
    structure = {"pre_block_layers": [table], "sequential_blocks": blocks}
    model.get_quantization_layer_structure = lambda mode: structure
    data = {"dataset": list(tokens), "tokenizer": str, "num_samples": 4, "sequence_length": 8}
    model.quantize("gptq", config=config_of("gptq", group=5, **data))
    x = tokens[:, :-1]
    expected = outputs(keras_mp.stabilize(model), x)  # before it is saved: Keras leaves the zero points out
    model.save(tmp_path / "quantized.keras")
    model = keras.saving.load_model(tmp_path / "quantized.keras")
    np.testing.assert_array_equal(outputs(model, x), expected)
    for layer in model.layers[1:]:
        layer.enable_lora(4)
    model.layers[0].trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras_mp.prepare(model, keras.optimizers.Adam(0.02), loss)
    losses = model.fit(x, tokens[:, 1:], epochs=40, verbose=0).history["loss"]
    assert losses[-1] < 0.85 * losses[0]
    if keras.backend.backend() == "tensorflow":
        assert keras_mp.export_float32(model, tmp_path / "exported", x).max_difference <= 1e-5
