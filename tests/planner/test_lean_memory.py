"""What the lean GPT needs beside Keras's own layers, by the compiler of an H100."""

import keras
import pytest

import keras_mp
from benchmarks.plain_models import plain_gpt
from models.gpt import gpt
from models.transformer import Size

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 1, 768, 12, 50304, 1024, 32  # GPT-2, of 12 blocks one


def temporary(model, loss):
    """The bytes beside weights, optimizer and batch."""
    model.compile(keras.optimizers.AdamW(1e-3), loss, jit_compile=True)
    tokens = keras.KerasTensor((BATCH, LENGTH), "int32")
    return keras_mp.inspect(model, (tokens, tokens), "h100").memory.temporary


@pytest.mark.slow
def test_a_mixed_precision_gpt_takes_half_of_kerass_memory():
    keras.config.set_dtype_policy("mixed_bfloat16")
    of_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain = temporary(plain_gpt(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH), of_logits)
    lean = temporary(gpt(Size(LAYERS, WIDTH, HEADS), VOCABULARY, LENGTH), keras_mp.lean.ChunkedCrossEntropy())
    assert lean < plain / 2
