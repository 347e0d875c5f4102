"""Models as tutorials write them: without `get_config()`, without `**kwargs`, with training steps of their own."""

import keras
import numpy as np
from keras import layers, ops

TENSORFLOW = keras.backend.backend() == "tensorflow"


class TransformerBlock(layers.Layer):
    """As in "Text classification with Transformer" on keras.io, before it had get_config()."""

    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs, training=False):
        attn_output = self.dropout1(self.att(inputs, inputs), training=training)
        out1 = self.layernorm1(inputs + attn_output)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1), training=training))


class Patches(layers.Layer):
    """As in "Image classification with Vision Transformer" on keras.io."""

    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        _, height, width, channels = images.shape
        size = self.patch_size
        return ops.reshape(
            ops.image.extract_patches(images, size=size),
            (ops.shape(images)[0], (height // size) * (width // size), size * size * channels),
        )

    def get_config(self):
        config = super().get_config()
        config.update({"patch_size": self.patch_size})
        return config


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
        return self.projection(patch) + self.position_embedding(positions)

    def get_config(self):
        config = super().get_config()
        config.update({"num_patches": self.num_patches})
        return config

    @classmethod
    def from_config(cls, config):  # its get_config() forgets the width
        return cls(config["num_patches"], 16)


def vision_transformer():
    inputs = keras.Input((8, 8, 3))
    encoded = PatchEncoder(4, 16)(Patches(4)(inputs))
    x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
    x2 = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.1)(x1, x1), encoded])
    x3 = layers.Dense(16, activation=keras.activations.gelu)(layers.LayerNormalization(epsilon=1e-6)(x2))
    representation = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x3, x2])))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.5)(representation)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss, metrics=["accuracy"])
    random = np.random.default_rng()
    return model, random.normal(size=(16, 8, 8, 3)).astype("float32"), random.integers(0, 3, 16)


class GAN(keras.Model):
    """As in "GAN overriding Model.train_step" on keras.io."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        import tensorflow as tf

        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = ops.shape(real_images)[0]
        shape = (batch_size, self.latent_dim)
        generated_images = self.generator(keras.random.normal(shape=shape, seed=self.seed_generator))
        combined_images = ops.concatenate([ops.cast(generated_images, real_images.dtype), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(keras.random.normal(shape=shape, seed=self.seed_generator)))
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def adversarial():
    discriminator = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, strides=2, padding="same"), layers.LeakyReLU(negative_slope=0.2),
         layers.GlobalMaxPooling2D(), layers.Dense(1)], name="discriminator",
    )  # fmt: skip
    generator = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16), layers.Reshape((4, 4, 1)), layers.BatchNormalization(),
         layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid")], name="generator",
    )  # fmt: skip
    model = GAN(discriminator=discriminator, generator=generator, latent_dim=4)
    model.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model, np.random.default_rng().uniform(size=(16, 8, 8, 1)).astype("float32"), None


class CustomModel(keras.Model):
    """As in "Customizing what happens in fit()" on keras.io: a model of one's own around a functional graph."""

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {"loss": loss}


def own_train_step():
    inputs = keras.Input(shape=(8,))
    x = layers.BatchNormalization()(layers.Dense(16)(inputs))
    model = CustomModel(inputs, layers.Dense(1)(x))
    model.compile(optimizer="adam", loss="mse")
    random = np.random.default_rng()
    return model, random.normal(size=(16, 8)).astype("float32"), random.normal(size=(16, 1)).astype("float32")


class Classifier(keras.Model):
    """As in "Making new layers and models via subclassing" on keras.io."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.num_classes = num_classes
        self.block_1 = layers.Dense(16, activation="relu")
        self.norm = layers.BatchNormalization()
        self.classifier = layers.Dense(num_classes, activation="softmax", dtype="float32")

    def call(self, inputs):
        return self.classifier(self.norm(self.block_1(inputs)))


def subclassed():
    model = Classifier()
    random = np.random.default_rng()
    x, y = random.normal(size=(16, 8)).astype("float32"), random.integers(0, 3, 16)
    model(x)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model, x, y


MODELS = {
    build.__name__: build
    for build in (
        vision_transformer, adversarial, own_train_step, subclassed,
    )
}  # fmt: skip
ONLY_ON_TENSORFLOW = {"adversarial", "own_train_step"}  # their steps take its tape
CLASSES = {
    cls.__name__: cls
    for cls in (
        TransformerBlock, Patches, PatchEncoder, GAN, CustomModel, Classifier,
    )
}  # fmt: skip
