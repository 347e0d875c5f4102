"""The transformers of models/ as they are written without the kit: of Keras's layers alone."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from models.transformer import add_positions, initializer


def plain_gpt(layer_count: int, width: int, heads: int, vocabulary: int, length: int) -> keras.Model:
    """The GPT of models/gpt.py of Keras's layers alone."""
    embedding = layers.ReversibleEmbedding(vocabulary, width, embeddings_initializer=initializer())
    tokens = keras.Input((length,), dtype="int32")
    x = add_positions(embedding(tokens))
    for _ in range(layer_count):
        x = _block(x, width, heads, 1e-5, causal=True)
    logits = embedding(layers.LayerNormalization(epsilon=1e-5)(x), reverse=True)
    return keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits))


def plain_vit(layer_count: int, width: int, heads: int, classes: int, side: int, patch: int) -> keras.Model:
    """The vision transformer of models/vit.py of Keras's layers alone."""
    images = keras.Input((side, side, 3))
    x = layers.Conv2D(width, patch, patch, kernel_initializer=initializer())(images)
    x = layers.Reshape((-1, width))(x)
    entry = keras.ops.zeros_like(x[:, :1, 0], dtype="int32")
    class_token = layers.Embedding(1, width, embeddings_initializer=initializer())(entry)
    x = add_positions(layers.Concatenate(axis=1)([class_token, x]))
    for _ in range(layer_count):
        x = _block(x, width, heads, 1e-6, causal=False)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    logits = layers.Dense(classes, kernel_initializer=initializer())(x[:, 0])
    return keras.Model(images, layers.Activation("linear", dtype="float32")(logits))


def _block(x: Any, width: int, heads: int, epsilon: float, causal: bool) -> Any:
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    attention = layers.MultiHeadAttention(heads, width // heads, kernel_initializer=initializer())
    x = layers.Add()([x, attention(y, y, use_causal_mask=causal)])
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    y = layers.Dense(4 * width, kernel_initializer=initializer())(y)
    y = keras.ops.gelu(y, approximate=True)
    return layers.Add()([x, layers.Dense(width, kernel_initializer=initializer())(y)])
