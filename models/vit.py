"""The vision transformer, in functional Keras and the kit's lean layers.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021 (arXiv:2010.11929), equations 1 to 4, with the sizes that
Touvron et al. 2021 (DeiT, arXiv:2012.12877, table 1) call Ti, S and B.
"""

import keras
from keras import layers, ops

import keras_mp
from models.transformer import BLOCK_RULES, Size, add_positions, block, check_positive, find_size, initializer

TENSOR_RULES = BLOCK_RULES
SIZES = {"tiny": Size(12, 192, 3), "small": Size(12, 384, 6), "base": Size(12, 768, 12)}


@keras_mp.parallel.tensor_rules(TENSOR_RULES)
def vit(
    size: str | Size = "base",
    classes: int = 1000,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    patch: int = 16,
    dropout: float = 0.0,
    remat: bool = False,
) -> keras.Model:
    """Builds the classifier: a learned class token before the patches, whose last state gives the logits.

    The paper's GELU is exact; this one is the approximation by tanh.

    Args:
        size: `"tiny"` (5.7 million parameters), `"small"` (22), `"base"` (87), or a `Size`.
        classes: number of classes.
        input_shape: `(height, width, channels)` of an image; height and width are multiples of `patch`.
        patch: pixels of a patch's side.
        dropout: share of the embeddings' and of each branch's output that is dropped while training.
        remat: whether the backward pass recomputes each block, which takes a third more operations and keeps far less.

    Returns:
        A `keras.Model` from images `(batch, height, width, channels)` to float32 logits `(batch, classes)`.

    Raises:
        ValueError: for an unknown size, or numbers that do not fit.
    """
    size = find_size(size, SIZES)
    check_positive(classes=classes, patch=patch)
    if len(input_shape) != 3 or any(side is None or side < 1 for side in input_shape):
        raise ValueError(f"input_shape is (height, width, channels), each at least 1, got {input_shape!r}")
    if input_shape[0] % patch or input_shape[1] % patch:
        raise ValueError(f"input_shape must be a multiple of patch {patch} in height and width, got {input_shape!r}")
    images = keras.Input(input_shape, name="images")
    x = layers.Conv2D(size.width, patch, patch, kernel_initializer=initializer(), name="patches")(images)
    x = layers.Reshape((-1, size.width), name="tokens")(x)
    # An embedding of one entry, the same for each image.
    entry = ops.zeros_like(x[:, :1, 0], dtype="int32")
    class_token = layers.Embedding(1, size.width, embeddings_initializer=initializer(), name="class_token")(entry)
    x = add_positions(layers.Concatenate(axis=1, name="class_and_patches")([class_token, x]))
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    for index in range(size.layers):
        x = block(x, size, f"block{index + 1}", dropout, epsilon=1e-6, remat=remat)
    x = layers.LayerNormalization(epsilon=1e-6, name="normalization")(x)
    logits = layers.Dense(classes, kernel_initializer=initializer(), name="logits")(x[:, 0])
    logits = layers.Activation("linear", dtype="float32", name="logits_float32")(logits)
    return keras.Model(images, logits, name="vit")
