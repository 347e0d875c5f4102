"""What the compilers of a TPU and of a GPU make of an update with states in 8 bits; JAX, with nothing attached."""

import keras
import keras_hub
import pytest

import keras_mp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="shapes alone make the step on JAX"),
]


def test_gradients_in_16_bits_get_no_float32_copy():
    """Clipping by the norm of all gradients keeps all of them from the backward pass to the update."""
    layers, width = 6, 1024

    def temporary(policy):
        keras.config.set_dtype_policy(policy)
        dense = [keras.layers.Dense(width, "relu", False, kernel_initializer="zeros") for _ in range(layers)]
        model = keras.Sequential([keras.Input((width,)), *dense])
        optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
        model.compile(keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none(), state_dtype="float8"), "mse")
        batch = keras.KerasTensor((8, width), "float32")
        return keras_mp.inspect(model, (batch, batch), "h100").memory.temporary / (layers * width**2)

    # Bytes a parameter: activations of 8 rows are a few hundredths.
    assert temporary("float32") > 3.9
    for policy in ("bfloat16", "mixed_bfloat16"):
        assert 1.9 < temporary(policy) < 2.3, policy


def test_accumulating_copies_no_weights_or_states():
    """In a branch XLA writes what an update changes beside what it was."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    dense = [keras.layers.Dense(1024, use_bias=False, kernel_initializer="zeros") for _ in range(6)]
    model = keras.Sequential([keras.Input((1024,)), *dense])
    optimizer = keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=4)
    model.compile(keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none(), state_dtype="float8"), "mse")
    batch = keras.KerasTensor((8, 1024), "float32")
    for chip in ("rtx4090", "v5e"):
        memory = keras_mp.inspect(model, (batch, batch), chip).memory
        state = memory.parameters + memory.optimizer  # 10 bytes a parameter, with the sums
        assert memory.temporary < 0.6 * state, chip  # gradients and kernels in bfloat16, and a weight's float32 values


def test_a_tied_embedding_that_is_released_waits_without_an_array_of_zeros():
    vocabulary, width = 65536, 512
    keras.config.set_dtype_policy("bfloat16")
    tokens = keras.Input((512,), dtype="int32")
    embedding = keras_hub.layers.ReversibleEmbedding(vocabulary, width, embeddings_initializer="zeros")
    x = embedding(tokens)
    for _ in range(2):
        x = keras.layers.Dense(width)(keras.layers.Dense(4 * width, "relu")(x))
    model = keras_mp.lean.make_lean(keras.Model(tokens, embedding(x, reverse=True)))
    inner, none = keras.optimizers.AdamW(1e-3), keras_mp.LossScale.none()
    optimizer = keras_mp.LossScaleOptimizer(inner, none, state_dtype="float8", release_gradients=True)
    model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy())
    batch = keras.KerasTensor((8, 512), "int32")
    memory = keras_mp.inspect(model, (batch, batch), "h100").memory
    # The sum of the head's gradient in float32, a chunk of logits in float32 and in 16 bits twice: 4.4 times its size.
    assert memory.temporary < 4.9 * 4 * vocabulary * width
