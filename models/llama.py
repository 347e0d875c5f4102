"""Llama: a decoder-only language model with rotary positions, in functional Keras and the kit's lean layers.

Touvron et al., "Llama 2", 2023 (arXiv:2307.09288), and the Llama team, "The Llama 3 Herd of Models", 2024
(arXiv:2407.21783, table 3): no biases, RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467), keys and values for groups of
queries, and SwiGLU. The scaling of frequencies is `apply_scaling` of Meta's `llama-models`, models/llama3/model.py; its
numbers are `rope_scaling` of the checkpoints' config.json. A block is

    x = x + attention(normalize(x))
    x = x + down(silu(gate(normalize(x))) up(normalize(x)))
"""

import math
from typing import NamedTuple

import keras
from keras import layers

import keras_mp
from models.self_attention import SelfAttention
from models.transformer import ATTENTION_RULES, EMBEDDING_RULES, check_positive, initializer, language_model, recomputed

TENSOR_RULES = (
    *ATTENTION_RULES,
    (r"block\d+_(gate|up)[/_]kernel", (None, "model")),
    (r"block\d+_down[/_]kernel", ("model", None)),
    *EMBEDDING_RULES,
)


class Scaling(NamedTuple):
    """How Llama 3.1 and later slow rotations down for sequences longer than those of the first training.

    Attributes:
        factor: long wavelengths are multiplied by it.
        low, high: wavelengths above `length / low` are long; below `length / high` they stay, and between they mix.
        length: tokens of a sequence of the first training.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    length: int = 8192


class LlamaSize(NamedTuple):
    """How large a Llama is, and how its positions are encoded.

    Attributes:
        layers: number of blocks.
        width: features of a token; a multiple of `heads`.
        heads: heads of the queries, of an even number of features; a multiple of `key_heads`.
        key_heads: heads of the keys and values.
        hidden: features between the products of SwiGLU.
        vocabulary: number of different tokens.
        tied: whether the output layer uses the weights of the token embedding.
        theta: the longest wavelength in tokens, divided by 2 pi, before scaling.
        scaling: the scaling of the wavelengths.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    tied: bool = False
    theta: float = 10000.0
    scaling: Scaling | None = None


SIZES = {
    "llama2-7b": LlamaSize(32, 4096, 32, 32, 11008, 32000),
    "llama3-8b": LlamaSize(32, 4096, 32, 8, 14336, 128256, theta=500000.0),
    "llama3.2-1b": LlamaSize(16, 2048, 32, 8, 8192, 128256, tied=True, theta=500000.0, scaling=Scaling(32.0)),
}


@keras_mp.parallel.tensor_rules(TENSOR_RULES)
def llama(size: str | LlamaSize = "llama3.2-1b", length: int = 2048, remat: bool = False) -> keras.Model:
    """Builds the language model. Training it on sequences of one length keeps every step's shape the same.

    Args:
        size: `"llama2-7b"`, `"llama3-8b"`, `"llama3.2-1b"`, or a `LlamaSize`.
        length: tokens of a sequence; all have this length.
        remat: whether the backward pass recomputes each block, which takes a third more operations and keeps far less.

    Returns:
        A lean `keras.Model` from tokens `(batch, length)`, int32, to float32 logits `(batch, length, vocabulary)` of
        the next token. Compiled with `keras_mp.lean.ChunkedCrossEntropy()` it trains without making all logits.

    Raises:
        ValueError: for an unknown size, or numbers that do not fit.
    """
    size = _find(size)
    check_positive(length=length)
    embedding = layers.ReversibleEmbedding(
        size.vocabulary,
        size.width,
        tie_weights=size.tied,
        embeddings_initializer=initializer(),
        name="tokens_embedding",
    )
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = embedding(tokens)
    for index in range(size.layers):
        name = f"block{index + 1}"
        x = recomputed(lambda x, name=name: _block(x, size, name), [x], name) if remat else _block(x, size, name)
    logits = embedding(_normalize(x, "normalization"), reverse=True)
    logits = layers.Activation("linear", dtype="float32", name="logits_float32")(logits)
    return language_model(tokens, logits, size.width, "llama")


def frequencies(size: LlamaSize) -> list[float]:
    """The rotation of each pair of a head's features, in radians a token."""
    pairs = size.width // size.heads // 2
    return [_scaled(size.theta ** (-pair / pairs), size.scaling) for pair in range(pairs)]


def _scaled(frequency: float, scaling: Scaling | None) -> float:
    if scaling is None:
        return frequency
    turns = scaling.length * frequency / (2 * math.pi)
    kept = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _find(size: str | LlamaSize) -> LlamaSize:
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"size is one of {', '.join(SIZES)}, or a LlamaSize, got {size!r}")
        return SIZES[size]
    size = LlamaSize(*size)
    check_positive(**dict(list(size._asdict().items())[:6]))
    if size.width % (2 * size.heads):
        raise ValueError(f"width must be a multiple of twice the heads, got width {size.width}, {size.heads} heads")
    return size


def _normalize(x, name):
    return layers.RMSNormalization(epsilon=1e-5, name=name)(x)


def _dense(x, units, name):
    return layers.Dense(units, use_bias=False, kernel_initializer=initializer(), name=name)(x)


def _block(x, size, name):
    y = _normalize(x, f"{name}_attention_normalization")
    y = SelfAttention(
        size.heads,
        size.key_heads,
        causal=True,
        use_bias=False,
        kernel_initializer=initializer(),
        rotary=frequencies(size),
        name=f"{name}_attention",
    )(y)
    x = layers.Add(name=f"{name}_attention_add")([x, y])

    y = _normalize(x, f"{name}_swiglu_normalization")
    # Keras's own silu: XLA keeps no more of it for the backward pass than of a function with a gradient of its own.
    gate = layers.Activation("silu", name=f"{name}_silu")(_dense(y, size.hidden, f"{name}_gate"))
    y = layers.Multiply(name=f"{name}_multiply")([gate, _dense(y, size.hidden, f"{name}_up")])
    return layers.Add(name=f"{name}_swiglu_add")([x, _dense(y, size.width, f"{name}_down")])
