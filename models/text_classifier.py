"""A text classifier: a bidirectional encoder and the mean of its tokens, in functional Keras and the kit's lean layers.

After Devlin, Chang, Lee, Toutanova, "BERT", 2019 (arXiv:1810.04805), without segments, with the normalization before
each branch, and with the mean over the tokens where BERT takes its first one.
"""

import keras
from keras import layers, ops

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
)

TENSOR_RULES = (*BLOCK_RULES, *EMBEDDING_RULES)
PADDING = 0

# Turc, Chang, Lee, Toutanova, "Well-Read Students Learn Better", 2019 (arXiv:1908.08962), table 1.
SIZES = {
    "tiny": Size(2, 128, 2),
    "mini": Size(4, 256, 4),
    "small": Size(4, 512, 8),
    "medium": Size(8, 512, 8),
    "base": Size(12, 768, 12),
}


@keras_mp.parallel.tensor_rules(TENSOR_RULES)
def text_classifier(
    size: str | Size = "base",
    classes: int = 2,
    vocabulary: int = 30522,
    length: int = 512,
    dropout: float = 0.1,
    vocabulary_multiple: int = 128,
    remat: bool = False,
) -> keras.Model:
    """Builds the classifier. Token 0 is padding: no token sees it, and it is not in the mean.

    Args:
        size: `"tiny"`, `"mini"`, `"small"`, `"medium"`, `"base"`, or a `Size`.
        classes: number of classes.
        vocabulary: number of different tokens, padding included.
        length: tokens of a sequence; shorter ones are padded to it with 0.
        dropout: share of the embeddings' and of each branch's output that is dropped while training.
        vocabulary_multiple: the vocabulary is padded with tokens that never occur up to a multiple of this, because
            matrix units work in tiles of up to 128.
        remat: whether the backward pass recomputes each block, which takes a third more operations and keeps far less.

    Returns:
        A `keras.Model` from tokens `(batch, length)`, int32, to float32 logits `(batch, classes)`.

    Raises:
        ValueError: for an unknown size, or numbers that do not fit.
    """
    size = find_size(size, SIZES)
    check_positive(classes=classes, vocabulary=vocabulary, length=length, vocabulary_multiple=vocabulary_multiple)
    padded = -(-vocabulary // vocabulary_multiple) * vocabulary_multiple
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    real = ops.not_equal(tokens, PADDING)
    x = layers.Embedding(padded, size.width, embeddings_initializer=initializer(), name="tokens_embedding")(tokens)
    x = layers.Dropout(dropout, name="embedding_dropout")(add_positions(x))
    for index in range(size.layers):
        x = block(x, size, f"block{index + 1}", dropout, mask=real[:, None, :], remat=remat)
    x = layers.LayerNormalization(epsilon=1e-5, name="normalization")(x)
    # A sum over hundreds of tokens needs float32, as the logits do.
    x = layers.Activation("linear", dtype="float32", name="tokens_float32")(x)
    weights = ops.cast(real, "float32")[:, :, None]
    # At least 1, so that a text without a token gives finite logits.
    mean = ops.sum(x * weights, axis=1) / ops.maximum(ops.sum(weights, axis=1), 1.0)
    logits = layers.Dense(classes, kernel_initializer=initializer(), name="logits")(mean)
    logits = layers.Activation("linear", dtype="float32", name="logits_float32")(logits)
    return keras.Model(tokens, logits, name="text_classifier")
