"""Models as people write them by hand, each with blocks of another kind; all follow the global policy."""

import keras
from keras import layers, ops

VOCABULARY, LENGTH, WIDTH = 40, 8, 16
# Whether a step runs eagerly, which takes less time than to trace it; JAX compiles each operation of an eager one.
EAGERLY = keras.backend.backend() == "tensorflow"


@keras.saving.register_keras_serializable("own_blocks")
class TransformerBlock(layers.Layer):
    """The block of keras.io's miniature GPT, with a GELU."""

    def __init__(self, width=WIDTH, heads=2, rate=0.1, **arguments):
        super().__init__(**arguments)
        self.width, self.heads, self.rate = width, heads, rate
        self.att = layers.MultiHeadAttention(heads, width // heads)
        self.ffn = keras.Sequential([layers.Dense(2 * width, activation="gelu"), layers.Dense(width)])
        self.layernorm1, self.layernorm2 = (layers.LayerNormalization(epsilon=1e-6) for _ in range(2))
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs):
        attended = self.dropout1(self.att(inputs, inputs, use_causal_mask=True))
        x = self.layernorm1(inputs + attended)
        return self.layernorm2(x + self.dropout2(self.ffn(x)))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "heads": self.heads, "rate": self.rate}


@keras.saving.register_keras_serializable("own_blocks")
class Embeddings(layers.Layer):
    """Tokens and their positions."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.token_emb = layers.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.token_emb(x) + self.pos_emb(ops.arange(ops.shape(x)[-1]))


@keras.saving.register_keras_serializable("own_blocks")
class MiniGpt(keras.Model):
    """keras.io's miniature GPT as a subclassed model with a list of blocks."""

    def __init__(self, blocks=3, rate=0.1, **arguments):
        super().__init__(**arguments)
        self.count, self.rate = blocks, rate
        self.embeddings = Embeddings()
        self.blocks = [TransformerBlock(rate=rate, name=f"block_{index}") for index in range(blocks)]
        self.head = layers.Dense(VOCABULARY)

    def call(self, tokens):
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_config(self):
        return {**super().get_config(), "blocks": self.count, "rate": self.rate}


def mini_gpt(**settings):
    model = MiniGpt(**settings)
    model(ops.zeros((1, LENGTH), "int32"))
    return model


def vit(blocks=3, rate=0.1):
    """keras.io's vision transformer: a loop in a function, no layer for a block."""
    images = keras.Input((8, 8, 3))
    x = layers.Reshape((16, WIDTH))(layers.Conv2D(WIDTH, 2, 2)(images))
    for _ in range(blocks):
        normalized = layers.LayerNormalization(epsilon=1e-6)(x)
        attended = layers.MultiHeadAttention(2, WIDTH // 2, dropout=rate)(normalized, normalized)
        skipped = layers.Add()([attended, x])
        y = layers.LayerNormalization(epsilon=1e-6)(skipped)
        for units in (2 * WIDTH, WIDTH):
            y = layers.Dropout(rate)(layers.Dense(units, activation="gelu")(y))
        x = layers.Add()([y, skipped])
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    return keras.Model(images, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def resnet(stages=(2, 2), rate=0.0):
    """A flat residual network: each stage begins with a block of another width."""
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(images)
    for stage, count in enumerate(stages):
        width = 8 * 2**stage
        for index in range(count + 1):
            first = index == 0
            y = layers.Conv2D(width, 3, 2 if first else 1, padding="same")(x)
            y = layers.Dropout(rate)(layers.ReLU()(layers.BatchNormalization()(y)))
            y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(y))
            if first:
                x = layers.Conv2D(width, 1, 2)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(images, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


@keras.saving.register_keras_serializable("own_blocks")
class Residual(layers.Layer):
    """A custom block with all that goes wrong: dropout, moving statistics, a loss, a mask, a tuple of outputs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.supports_masking = True
        self.dense, self.dropout = layers.Dense(WIDTH, activation="tanh"), layers.Dropout(0.2, seed=3)
        self.normalization = layers.BatchNormalization()

    def call(self, x, scale=None, mask=None):
        y = self.dropout(self.normalization(self.dense(x), mask=mask))
        self.add_loss(0.1 * ops.mean(ops.square(ops.cast(y, "float32"))))
        y = x + y if scale is None else x + scale * y
        return y, ops.mean(y, axis=-1)


@keras.saving.register_keras_serializable("own_blocks")
class Tower(layers.Layer):
    """Custom blocks inside another layer; each takes a tensor as a keyword, and the mask."""

    def __init__(self, blocks=3, **arguments):
        super().__init__(**arguments)
        self.supports_masking = True
        self.count, self.blocks = blocks, [Residual(name=f"residual_{index}") for index in range(blocks)]

    def call(self, x):
        mean = 0.0
        for block in self.blocks:
            x, of_block = block(x, scale=ops.ones_like(x[..., :1]) / 2)
            mean += of_block
        return x + mean[..., None]

    def get_config(self):
        return {**super().get_config(), "blocks": self.count}


def tower(**settings):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(Tower(**settings)(x))))
