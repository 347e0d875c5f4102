"""What the transformers of this folder share: the sizes, the positions and the block.

Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), with the normalization before each branch, as in
GPT-2 (Radford et al. 2019, section 2.3). A block is

    x = x + attention(normalize(x))
    x = x + dense(gelu(dense(normalize(x))))

Nothing here names a precision. All is made of Keras's own layers and the kit's lean ones, which compute the same and
keep less for the backward pass, but for the attention layer: a saved model needs `keras_mp` and
`models/self_attention.py` to be loaded.
"""

from collections.abc import Mapping
from typing import NamedTuple

import keras
from keras import layers, ops

import keras_mp
from models.self_attention import SelfAttention

# Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3: of the two products of a branch the first is split
# by columns and the second by rows, so that a branch needs one sum over the devices. The path of an optimizer's slot
# has "_" where a variable's has "/".
ATTENTION_RULES = (
    (r"block\d+_attention[/_]query_key_value[/_]kernel", (None, "model")),
    (r"block\d+_attention[/_]query_key_value[/_]bias", ("model",)),
    (r"block\d+_attention[/_]output[/_]kernel", ("model", None)),
)
BLOCK_RULES = (
    *ATTENTION_RULES,
    (r"block\d+_dense_1[/_]kernel", (None, "model")),
    (r"block\d+_dense_1[/_]bias", ("model",)),
    (r"block\d+_dense_2[/_]kernel", ("model", None)),
)
# The embedding is split by words, and so are the weights of an output layer that is not tied to it.
EMBEDDING_RULES = (
    (r"tokens_embedding[/_]embeddings", ("model", None)),
    (r"tokens_embedding[/_]reverse_embeddings", (None, "model")),
)


class Size(NamedTuple):
    """How large a transformer is.

    Attributes:
        layers: number of blocks.
        width: features of a token; a multiple of `heads`.
        heads: attention heads, each of `width / heads` features.
    """

    layers: int
    width: int
    heads: int


def find_size(size: str | Size, known: Mapping[str, Size]) -> Size:
    """Looks a size up by its name, or checks one that is given as numbers.

    Args:
        size: a name, or three numbers.
        known: the sizes by name.

    Returns:
        The size.

    Raises:
        ValueError: the name is unknown (lists the known ones), a number is below 1, or the heads do not divide the
            width.
    """
    if isinstance(size, str):
        if size not in known:
            raise ValueError(f"size is one of {', '.join(known)}, or a Size(layers, width, heads), got {size!r}")
        return known[size]
    size = Size(*size)
    check_positive(**size._asdict())
    if size.width % size.heads:
        raise ValueError(f"width must be a multiple of heads, got width {size.width} and {size.heads} heads")
    return size


def check_positive(**numbers: int) -> None:
    """Raises a ValueError that names the first argument below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")


def initializer() -> keras.Initializer:
    """GPT-2's and BERT's initial weights: normal, standard deviation 0.02.

    A new one for each layer, because an initializer draws the same values each time. GPT-2 also divides those of the
    residual branches by sqrt(2 layers); `SelfAttention` takes one initializer for all its weights, so here they are not
    divided.
    """
    return keras.initializers.RandomNormal(stddev=0.02)


def add_positions(x, name: str = "positions"):
    """Adds a learned vector to each position.

    Args:
        x: tokens, shape `(batch, length, width)`, with a known length.
        name: the name of the layer that holds the vectors.

    Returns:
        Tokens of the same shape.
    """
    length, width = x.shape[1:]
    # 0, 1, 2, ..., grown from one number of x, because what a layer is called on must come from the model's input. As
    # many as the model's length, whatever the input's: an input of another length then fails to add up.
    one = ops.ones_like(x[:1, :1, 0], dtype="int32")
    positions = ops.cumsum(ops.broadcast_to(one, (1, length)), axis=1) - 1
    return x + layers.Embedding(length, width, embeddings_initializer=initializer(), name=name)(positions)


def block(
    x,
    size: Size,
    name: str,
    dropout: float = 0.0,
    epsilon: float = 1e-5,
    causal: bool = False,
    mask=None,
    remat: bool = False,
):
    """Adds one block.

    Args:
        x: tokens, shape `(batch, length, width)`.
        size: the model's size.
        name: first part of the layers' names.
        dropout: share of each branch's output that is dropped while training. Attention weights are not dropped.
        epsilon: the number that the normalizations add to the variance.
        causal: whether a token sees only itself and those before it.
        mask: booleans, shape `(batch, 1, length)`, False for tokens that no token sees.
        remat: whether the backward pass recomputes the block from its input, which is then all that is kept. The block
            is a model of its own then, with the same weights in the same order.

    Returns:
        Tokens of the same shape.
    """

    def branches(x, mask=None):
        return _branches(x, size, name, dropout, epsilon, causal, mask)

    tensors = [x] if mask is None else [x, mask]
    return recomputed(branches, tensors, name) if remat else branches(*tensors)


def language_model(tokens, logits, width: int, name: str) -> keras.Model:
    """Makes a model from tokens to logits, lean where a token has more logits than features, `width`."""
    model = keras.Model(tokens, logits, name=name)
    return keras_mp.lean.make_lean(model) if logits.shape[-1] > width else model


def recomputed(branches, tensors: list, name: str):
    """Adds layers that the backward pass recomputes from their inputs.

    Args:
        branches: a function that adds the layers to tensors, and returns the last one's.
        tensors: the inputs.
        name: the name of the model that the layers become.

    Returns:
        What `branches` returned.
    """
    inputs = [keras.Input(tensor.shape[1:], dtype=tensor.dtype) for tensor in tensors]
    inner = keras.Model(inputs, branches(*inputs), name=name)
    return keras_mp.lean.remat(inner)(tensors[0] if len(tensors) == 1 else tensors)


def _branches(x, size, name, dropout, epsilon, causal, mask):
    y = layers.LayerNormalization(epsilon=epsilon, name=f"{name}_attention_normalization")(x)
    y = SelfAttention(size.heads, causal=causal, kernel_initializer=initializer(), name=f"{name}_attention")(
        y, mask=mask
    )
    y = layers.Dropout(dropout, name=f"{name}_attention_dropout")(y)
    x = layers.Add(name=f"{name}_attention_add")([x, y])

    y = layers.LayerNormalization(epsilon=epsilon, name=f"{name}_dense_normalization")(x)
    y = layers.Dense(4 * size.width, kernel_initializer=initializer(), name=f"{name}_dense_1")(y)
    # By tanh, as in GPT-2: the exact one has no ONNX operation.
    y = keras_mp.layers.Gelu(name=f"{name}_gelu")(y)
    y = layers.Dense(size.width, kernel_initializer=initializer(), name=f"{name}_dense_2")(y)
    y = layers.Dropout(dropout, name=f"{name}_dense_dropout")(y)
    return layers.Add(name=f"{name}_dense_add")([x, y])
