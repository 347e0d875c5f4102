"""Whole logits or chunks of them: `make_lean` takes what needs less memory, by the compiler of an H100."""

import keras
import pytest

import keras_mp
from keras_mp.lean.cross_entropy import chunks_save_memory

VOCABULARY, WIDTH = 65536, 256


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "chunks"),
    [
        (8 * 1024, 768, 50257, True),  # GPT-2
        (8 * 1024, 896, 151936, True),  # Qwen2.5 0.5B
        (2048, 2048, 256000, False),  # Gemma 2B: the kernel is as large as the logits
        (1, 768, 50257, False),
        (None, 768, 50257, True),
    ],
)
def test_the_number_of_rows_decides(rows, width, vocabulary, chunks, itemsize):
    assert chunks_save_memory(rows, width, vocabulary, itemsize) is chunks


@pytest.mark.slow
@pytest.mark.jax
def test_lean_is_never_larger():
    rows = 512
    keras.config.set_dtype_policy("mixed_bfloat16")

    def temporary(lean):
        def build():
            inputs = keras.Input((None,), dtype="int32")
            model = keras.Model(inputs, keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(64, WIDTH)(inputs)))
            model = keras_mp.lean.make_lean(model) if lean else model
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
            return model

        tokens = keras.KerasTensor((8, rows // 8), "int32")
        return keras_mp.inspect(build, (tokens, tokens), "h100").memory.temporary

    # On JAX the gradient of a lean embedding begins with a number of its own: one unit of a device's alignment.
    assert temporary(lean=True) <= temporary(lean=False) + 256
