"""The models of published runs that models/ has not, as their sources build them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import keras_mp
from models.resnet import _convolve
from models.transformer import initializer, recomputed


class _Heads(layers.Layer):
    """Attention of queries, keys and values that lie side by side, of heads whose features do not add up to the width.

    Args:
        heads: the number of heads.
        theta: the longest wavelength of rotary positions, divided by 2 pi; 0 without them.
        flash: whether the chip's kernel attends; without it scores are in memory, as in MaxText's
            `attention=dot_product`.
    """

    def __init__(self, heads: int, theta: float = 0.0, flash: bool = True, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.heads, self.theta, self.flash = heads, theta, flash

    def call(self, inputs: Any) -> Any:
        length, features = inputs.shape[1:]
        parts = keras.ops.split(inputs, 3, axis=-1)
        rows = [keras.ops.reshape(part, (-1, length, self.heads, features // (3 * self.heads))) for part in parts]
        if self.theta:
            rows[:2] = map(self._turned, rows[:2])
        if self.flash:
            seen = keras_mp.lean.attention(*rows, causal=True)
        else:
            seen = keras.ops.dot_product_attention(*rows, is_causal=True, flash_attention=False)
        return keras.ops.reshape(seen, (-1, length, features // 3))

    def _turned(self, rows: Any) -> Any:
        length, pairs = rows.shape[1], rows.shape[3] // 2
        rate = self.theta ** (-np.arange(pairs) / pairs)
        angles = np.arange(length)[:, None, None] * rate
        cosine, sine = (keras.ops.cast(part(angles), rows.dtype) for part in (np.cos, np.sin))
        first, second = keras.ops.split(rows, 2, axis=-1)
        return keras.ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def maxtext_decoder(
    blocks: int, width: int, heads: int, head: int, hidden: int, vocabulary: int, length: int, remat: bool
) -> keras.Model:
    """MaxText's own decoder up to February 2024: a branch of attention beside one of two products and a ReLU.

        y = normalize(x)
        x = x + attention(y) + down(relu(up(y)))

    Args:
        blocks: number of blocks.
        width: features of a token.
        heads: attention heads.
        head: features of a head.
        hidden: features between the two products.
        vocabulary: number of different tokens, whose embedding is the output layer, too.
        length: tokens of a sequence.
        remat: whether the backward pass recomputes each block.
    """

    def dense(x: Any, units: int, name: str) -> Any:
        return layers.Dense(units, use_bias=False, kernel_initializer=initializer(), name=name)(x)

    def block(x: Any, name: str) -> Any:
        y = layers.RMSNormalization(name=f"{name}_normalization")(x)
        seen = _Heads(heads, name=f"{name}_attention")(dense(y, 3 * heads * head, f"{name}_query_key_value"))
        active = layers.Activation("relu", name=f"{name}_relu")(dense(y, hidden, f"{name}_up"))
        added = [x, dense(seen, width, f"{name}_output"), dense(active, width, f"{name}_down")]
        return layers.Add(name=f"{name}_add")(added)

    embedding = layers.ReversibleEmbedding(vocabulary, width, embeddings_initializer=initializer(), name="tokens")
    tokens = keras.Input((length,), dtype="int32")
    x = embedding(tokens)
    for name in (f"block{index + 1}" for index in range(blocks)):
        x = recomputed(lambda x, name=name: block(x, name), [x], name) if remat else block(x, name)
    logits = embedding(layers.RMSNormalization(name="normalization")(x), reverse=True)
    return keras_mp.lean.make_lean(keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits)))


def maxtext_llama(
    blocks: int,
    width: int,
    heads: int,
    head: int,
    hidden: int,
    vocabulary: int,
    length: int,
    theta: float,
    flash: bool = False,
) -> keras.Model:
    """A Llama of MaxText whose heads' features do not add up to the width.

    All products are kept but those of attention, which is recomputed from queries, keys and values.

    Args:
        blocks, width, heads, head, hidden, vocabulary, length: the sizes, as of `maxtext_decoder`.
        theta: the longest wavelength of the rotary positions in tokens, divided by 2 pi.
        flash: whether the chip's kernel attends, and a policy says what of a block is kept (benchmarks/selective.py).
    """

    def dense(x: Any, units: int, name: str) -> Any:
        return layers.Dense(units, use_bias=False, kernel_initializer=initializer(), name=name)(x)

    def block(x: Any, name: str) -> Any:
        y = layers.RMSNormalization(name=f"{name}_attention_normalization")(x)
        y = dense(y, 3 * heads * head, f"{name}_query_key_value")
        attention = _Heads(heads, theta, flash, name=f"{name}_attention")
        y = attention(y) if flash else recomputed(attention, [y], f"{name}_context")
        x = layers.Add(name=f"{name}_attention_add")([x, dense(y, width, f"{name}_output")])
        y = layers.RMSNormalization(name=f"{name}_normalization")(x)
        gate = layers.Activation("silu", name=f"{name}_silu")(dense(y, hidden, f"{name}_gate"))
        y = layers.Multiply(name=f"{name}_multiply")([gate, dense(y, hidden, f"{name}_up")])
        return layers.Add(name=f"{name}_add")([x, dense(y, width, f"{name}_down")])

    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, embeddings_initializer=initializer(), name="tokens")(tokens)
    for name in (f"block{index + 1}" for index in range(blocks)):
        x = recomputed(lambda x, name=name: block(x, name), [x], name) if flash else block(x, name)
    logits = dense(layers.RMSNormalization(name="normalization")(x), vocabulary, "logits")
    return keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits))


def resnext(blocks: Sequence[int] = (3, 4, 23, 3), groups: int = 32, width: int = 4, squeeze: int = 0) -> keras.Model:
    """ResNeXt-101 32x4d of NVIDIA's examples, with strides in the grouped convolution.

    Args:
        blocks: blocks of each stage.
        groups: groups of the 3x3 convolution.
        width: channels of a group in the first stage; each later stage doubles them.
        squeeze: the factor by which squeeze-and-excitation narrows the channels; 0 for none.
    """

    def block(x: Any, stage: int, stride: int, name: str) -> Any:
        inner, outer = groups * width * 2**stage, 256 * 2**stage
        y = _convolve(x, inner, 1, 1, f"{name}_1", activation="relu")
        y = layers.Conv2D(inner, 3, stride, "same", groups=groups, use_bias=False, name=f"{name}_2_conv")(y)
        y = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_2_normalization")(y)
        y = _convolve(layers.Activation("relu")(y), outer, 1, 1, f"{name}_3")
        if squeeze:
            means = layers.GlobalAveragePooling2D(keepdims=True)(y)
            weights = layers.Dense(outer, "sigmoid")(layers.Dense(outer // squeeze, "relu")(means))
            y = layers.Multiply()([y, weights])
        if stride > 1 or x.shape[-1] != outer:
            x = _convolve(x, outer, 1, stride, f"{name}_shortcut")
        return layers.Activation("relu")(layers.Add()([x, y]))

    images = keras.Input((224, 224, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(_convolve(images, 64, 7, 2, "stem", activation="relu"))
    for stage, count in enumerate(blocks):
        for index in range(count):
            x = block(x, stage, 2 if stage > 0 and index == 0 else 1, f"stage{stage + 1}_block{index + 1}")
    logits = layers.Dense(1000)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, layers.Activation("linear", dtype="float32")(logits))
