"""Models with quantized weights and LoRA: layers whose dequantized weights are known, and a tiny Gemma."""

import keras
import numpy as np
import pytest

from keras_mp.precision.policy import set_global_policy

keras_hub = pytest.importorskip("keras_hub", reason="the tiny Gemma is KerasHub's: pip install keras-hub")
pytest.importorskip("keras", "3.14", reason="Keras packs int4 in groups from 3.14")

GEMMA = {
    "vocabulary_size": 24, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 64,
    "intermediate_dim": 64, "head_dim": 16,
}  # fmt: skip
# A text that starts with 1, in which no token but the first tells the next by chance.
PLANTED = np.array([1, 7, 3, 19, 11, 5, 23, 2, 13, 17])
RANK, ALPHA = 4, 8
# What of a block gets LoRA: KerasHub's default is queries and values, which here are too few to know a text by heart.
TARGETS = ["query", "value", "attention_output", "ffw_linear"]


def known_kernel(shape, mode, generator):
    """Weights that quantization hits: whole multiples of a power of two, in each column the largest and the smallest.

    Groups of int4 have a zero point, and so the whole range of codes; without groups the range is symmetric.
    """
    low, high = {"int8": (-127, 127), "int4": (-7, 7), "int4 in groups": (-8, 7), None: (-90, 90)}[mode]
    codes = generator.integers(low, high + 1, shape)
    for start in range(0, shape[0], 8):  # a group, of the smallest size that the tests use
        codes[start], codes[start + 1] = low, high
    return codes * 2.0**-7


def adapt(layer, mode, config=None, rank=RANK, generator=None):
    """Quantizes a layer and gives it LoRA with random weights."""
    if mode is not None:
        layer.quantize(mode, config=config)
    if rank:
        layer.enable_lora(rank, lora_alpha=ALPHA)
        generator = generator or np.random.default_rng()
        for variable in layer.trainable_variables:
            if "lora" in variable.name:
                variable.assign(generator.normal(size=variable.shape) * 0.1)


def gemma(policy, mode="int4", rank=RANK, **sizes):
    """A causal language model of one block, with random weights; quantized, and with LoRA."""
    with set_global_policy(policy):
        keras.utils.set_random_seed(3)
        backbone = keras_hub.models.GemmaBackbone(**GEMMA | sizes)
        model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    if mode is not None:
        backbone.quantize(mode)
    if rank:
        backbone.enable_lora(rank, target_layer_names=TARGETS)
    return model


def tokens(text=PLANTED, rows=1):
    """A batch of the text but its last token, and what comes next."""
    x = np.repeat(text[None, :-1], rows, axis=0).astype("int32")
    return {"token_ids": x, "padding_mask": np.ones_like(x)}, np.repeat(text[None, 1:], rows, axis=0).astype("int32")


def logits(model, x):
    return np.asarray(keras.ops.convert_to_numpy(model(x, training=False))).astype("float64")
