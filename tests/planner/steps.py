"""Small models whose steps are inspected."""

import keras
from keras import layers

from models.gpt import gpt
from models.transformer import Size

TINY = Size(1, 128, 2)
VOCABULARY, LENGTH, BATCH = 256, 32, 4


def tensor(shape, dtype="float32"):
    return keras.KerasTensor(shape, dtype)


def tiny_gpt(policy="mixed_bfloat16"):
    """A compiled GPT and a batch."""
    keras.utils.clear_session()  # the same names each time, and so the same step
    keras.config.set_dtype_policy(policy)
    model = gpt(TINY, VOCABULARY, LENGTH)
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = tensor((BATCH, LENGTH), "int32")
    return model, (tokens, tokens)


def gpt_flops(training=True, causal_kernel=False):
    """All products of a step of the tiny GPT, from its dimensions alone.

    Backward is twice forward, and attention computes its scores once more. A kernel of attention leaves out the scores
    that causality hides: row i has i of them, counted from 1.
    """
    tokens, width = BATCH * LENGTH, TINY.width
    projections = TINY.layers * tokens * (4 * width * width + 2 * width * 4 * width) + tokens * width * VOCABULARY
    scores = TINY.layers * tokens * LENGTH * width  # and as many for their product with the values
    scores = scores * (LENGTH + 1) // (2 * LENGTH) if causal_kernel else scores
    return 2 * (3 * projections + (2 + 5) * scores if training else projections + 2 * scores)


def planted(rows=32):
    """A bfloat16 model with a layer of width 1001, a float32 product and a float16 softmax, and a batch."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((64,))
    x = layers.Dense(1001, name="odd")(inputs)
    x = layers.Dense(64, dtype="float32", name="full")(x)
    x = layers.Softmax(dtype="float16", name="probabilities")(x)
    model = keras.Model(inputs, layers.Dense(8, name="last")(x), name="planted")
    model.compile("adam", "mse")
    return model, (tensor((rows, 64)), tensor((rows, 8)))


def convolutional():
    """Two convolutions, the second strided, and a Dense layer; and a batch."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input((16, 16, 8)),
            layers.Conv2D(16, 3, padding="same", use_bias=False, name="first"),
            layers.BatchNormalization(),
            layers.Conv2D(24, 3, strides=2, name="second"),
            layers.Flatten(),
            layers.Dense(8, dtype="float32", name="head"),
        ],
        name="convolutional",
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, (tensor((4, 16, 16, 8)), tensor((4,), "int32"))
