"""Residual networks: the CIFAR form and the ImageNet form, in plain functional Keras.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016 (arXiv:1512.03385): section 4.2 for
`resnet_cifar`, table 1 for `resnet_imagenet`. A stage is a list of blocks at one resolution; a block is

    relu(shortcut(x) + normalize(convolve(... relu(normalize(convolve(x))))))

Nothing here names a precision: layers follow Keras's global dtype policy. Only the logits are cast, to float32.
"""

import keras
from keras import layers

BASIC, BOTTLENECK = "basic", "bottleneck"

# Blocks per stage: He et al. 2016, table 1.
IMAGENET_STAGES = {
    18: (BASIC, (2, 2, 2, 2)),
    34: (BASIC, (3, 4, 6, 3)),
    50: (BOTTLENECK, (3, 4, 6, 3)),
    101: (BOTTLENECK, (3, 4, 23, 3)),
    152: (BOTTLENECK, (3, 8, 36, 3)),
}


def resnet_cifar(
    depth: int = 20, classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3), width: int = 16
) -> keras.Model:
    """Builds the residual network for small images: a 3x3 stem and three stages of basic blocks.

    A shortcut that changes shape is a 1x1 convolution (the paper's option B), where the paper pads with zeros: 1%
    more parameters.

    Args:
        depth: layers with weights along the main path, 6n + 2 for n blocks a stage: 8, 14, 20, 32, 44, 56, 110.
        classes: number of classes.
        input_shape: `(height, width, channels)` of an image.
        width: channels of the first stage; each later stage doubles them.

    Returns:
        A `keras.Model` from images `(batch, height, width, channels)` to float32 logits `(batch, classes)`.

    Raises:
        ValueError: for a depth that is not 6n + 2, or sizes that are not positive.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth is 6n + 2 for n blocks a stage (8, 14, 20, 32, 44, 56, 110), got {depth!r}")
    _check_sizes(classes, input_shape, width)
    images = keras.Input(input_shape, name="images")
    x = _convolve(images, width, 3, 1, "stem", activation="relu")
    return _stages(images, x, BASIC, [(depth - 2) // 6] * 3, width, classes, f"resnet{depth}_cifar")


def resnet_imagenet(
    depth: int = 50,
    classes: int = 1000,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    width: int = 64,
    stem: str = "large",
) -> keras.Model:
    """Builds the residual network for large images: a 7x7 stem, a pooling, and four stages.

    Depths 50 and above use bottleneck blocks in the form known as v1.5: the stride sits in the 3x3 convolution
    (Goyal et al. 2017, arXiv:1706.02677), not in the first 1x1 one.

    Args:
        depth: 18, 34, 50, 101 or 152.
        classes: number of classes.
        input_shape: `(height, width, channels)` of an image.
        width: channels of the first stage; each later stage doubles them.
        stem: "large", or "small" for images of 32 pixels: a 3x3 convolution at full resolution, and no pooling.

    Returns:
        A `keras.Model` from images `(batch, height, width, channels)` to float32 logits `(batch, classes)`.

    Raises:
        ValueError: for another depth or stem, or sizes that are not positive.
    """
    if depth not in IMAGENET_STAGES:
        raise ValueError(f"depth is one of {', '.join(map(str, IMAGENET_STAGES))}, got {depth!r}")
    if stem not in ("large", "small"):
        raise ValueError(f"stem is 'large' or 'small', got {stem!r}")
    _check_sizes(classes, input_shape, width)
    block, blocks = IMAGENET_STAGES[depth]
    images = keras.Input(input_shape, name="images")
    if stem == "small":
        x = _convolve(images, width, 3, 1, "stem", activation="relu")
    else:
        x = _convolve(images, width, 7, 2, "stem", activation="relu")
        x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    return _stages(images, x, block, blocks, width, classes, f"resnet{depth}_imagenet")


def _stages(images, x, block, blocks, width, classes, name):
    """Adds the stages and the classifier, and closes the model."""
    residual = _basic if block == BASIC else _bottleneck
    for stage, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            x = residual(x, width * 2**stage, stride, f"stage{stage + 1}_block{index + 1}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(classes, name="logits")(x)
    logits = layers.Activation("linear", dtype="float32", name="logits_float32")(logits)
    return keras.Model(images, logits, name=name)


def _basic(x, filters, stride, name):
    y = _convolve(x, filters, 3, stride, f"{name}_1", activation="relu")
    y = _convolve(y, filters, 3, 1, f"{name}_2")
    return _join(x, y, filters, stride, name)


def _bottleneck(x, filters, stride, name):
    y = _convolve(x, filters, 1, 1, f"{name}_1", activation="relu")
    y = _convolve(y, filters, 3, stride, f"{name}_2", activation="relu")
    y = _convolve(y, 4 * filters, 1, 1, f"{name}_3")
    return _join(x, y, 4 * filters, stride, name)


def _join(x, y, filters, stride, name):
    if stride > 1 or x.shape[-1] != filters:
        x = _convolve(x, filters, 1, stride, f"{name}_shortcut")
    return layers.Activation("relu", name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, y]))


def _convolve(x, filters, kernel, stride, name, activation=None):
    # No bias: the normalization's offset makes it redundant.
    x = layers.Conv2D(
        filters, kernel, stride, padding="same", use_bias=False, kernel_initializer="he_normal", name=f"{name}_conv"
    )(x)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_normalization")(x)
    return layers.Activation(activation, name=f"{name}_relu")(x) if activation else x


def _check_sizes(classes, input_shape, width):
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes!r}")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width!r}")
    if len(input_shape) != 3 or any(size is None or size < 1 for size in input_shape):
        raise ValueError(f"input_shape is (height, width, channels), each at least 1, got {input_shape!r}")
