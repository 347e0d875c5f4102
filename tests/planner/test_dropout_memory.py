"""What dropout in lean attention takes, by the compiler of an H100: no random words, and the booleans of one block."""

import keras
import pytest

import keras_mp
from keras_mp.planner.chips.targets import find_target, missing_compiler

pytestmark = [
    pytest.mark.jax,
    pytest.mark.slow,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step that JAX traced"),
]
BATCH, LENGTH, HEADS, WIDTH = 8, 1024, 12, 768
BOOLEANS = BATCH * HEADS * 128 * LENGTH  # of a block of rows; as words they are four times as many bytes


def temporary(build, batch):
    if missing := missing_compiler(find_target("h100")):
        pytest.skip(missing)
    with keras_mp.set_global_policy("mixed_bfloat16"):
        return keras_mp.inspect(build, batch, target="h100").memory.temporary


def attending(dropout):
    x = keras.Input((LENGTH, WIDTH))
    y = x
    for _ in range(2):
        y = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=dropout)(y, y, use_causal_mask=True)
    model = keras_mp.lean.make_lean(keras.Model(x, y))
    model.compile("sgd", "mse", jit_compile=True)
    return model


def test_no_words_and_the_booleans_of_one_block():
    batch = (keras.KerasTensor((BATCH, LENGTH, WIDTH)),) * 2
    without, drops = (temporary(lambda rate=rate: attending(rate), batch) for rate in (0.0, 0.1))
    assert drops - without < 1.5 * BOOLEANS


def opt(lean):
    hub = pytest.importorskip("keras_hub").models
    backbone = hub.OPTBackbone(
        vocabulary_size=8192, num_layers=2, num_heads=8, hidden_dim=512, intermediate_dim=2048, max_sequence_length=512
    )
    model = hub.OPTCausalLM(backbone=backbone, preprocessor=None)
    if lean:
        keras_mp.lean.make_lean(model, remat=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-4), loss, jit_compile=True)
    return model


def test_an_opt_with_recomputed_blocks_takes_a_third():
    tokens = keras.KerasTensor((8, 512), "int32")
    batch = ({"token_ids": tokens, "padding_mask": tokens}, tokens)
    plain, lean = (temporary(lambda lean=lean: opt(lean), batch) for lean in (False, True))
    assert lean <= 0.35 * plain
