"""GPT: a decoder-only language model, in functional Keras and the kit's lean layers.

Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2).
"""

import keras
from keras import layers

import keras_mp
from models.transformer import (
    BLOCK_RULES,
    EMBEDDING_RULES,
    Size,
    add_positions,
    block,
    check_positive,
    find_size,
    initializer,
    language_model,
)

TENSOR_RULES = (*BLOCK_RULES, *EMBEDDING_RULES)

# "gpt2" is the smallest of GPT-2's table 2, with the heads of the code released with it. The others are ours.
SIZES = {"micro": Size(4, 128, 2), "mini": Size(6, 384, 6), "gpt2": Size(12, 768, 12)}


@keras_mp.parallel.tensor_rules(TENSOR_RULES)
def gpt(
    size: str | Size = "gpt2",
    vocabulary: int = 50257,
    length: int = 1024,
    tied: bool = True,
    dropout: float = 0.0,
    vocabulary_multiple: int = 128,
    remat: bool = False,
) -> keras.Model:
    """Builds the language model. Training it on sequences of one length keeps every step's shape the same.

    Args:
        size: `"micro"` (0.8 million parameters without the embeddings), `"mini"` (11), `"gpt2"` (85), or a `Size`.
        vocabulary: number of different tokens.
        length: tokens of a sequence; all have this length.
        tied: whether the output layer uses the weights of the token embedding.
        dropout: share of the embeddings' and of each branch's output that is dropped while training.
        vocabulary_multiple: the vocabulary is padded with tokens that never occur up to a multiple of this, because
            matrix units work in tiles of up to 128.
        remat: whether the backward pass recomputes each block, which takes a third more operations and keeps far less.

    Returns:
        A lean `keras.Model` from tokens `(batch, length)`, int32, to float32 logits `(batch, length, vocabulary)` of
        the next token; the vocabulary as padded. Compiled with `keras_mp.lean.ChunkedCrossEntropy()` it trains without
        making all logits.

    Raises:
        ValueError: for an unknown size, or numbers that do not fit.
    """
    size = find_size(size, SIZES)
    check_positive(vocabulary=vocabulary, length=length, vocabulary_multiple=vocabulary_multiple)
    padded = -(-vocabulary // vocabulary_multiple) * vocabulary_multiple
    embedding = layers.ReversibleEmbedding(
        padded, size.width, tie_weights=tied, embeddings_initializer=initializer(), name="tokens_embedding"
    )
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = add_positions(embedding(tokens))
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    for index in range(size.layers):
        x = block(x, size, f"block{index + 1}", dropout, causal=True, remat=remat)
    x = layers.LayerNormalization(epsilon=1e-5, name="normalization")(x)
    logits = embedding(x, reverse=True)
    logits = layers.Activation("linear", dtype="float32", name="logits_float32")(logits)
    return language_model(tokens, logits, size.width, "gpt")
