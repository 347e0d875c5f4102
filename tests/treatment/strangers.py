"""25 models in the manner of tutorials: few configs, few `**kwargs`, steps, losses and `compile` of their own.

Each function builds its model from a random generator, and returns it with a batch and what `compile` takes. Dropout
aside, what they draw is drawn from seeds that `keras.utils.set_random_seed` decides.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

TENSORFLOW = keras.backend.backend() == "tensorflow"


class Stranger(NamedTuple):
    """A model that is built, a batch, and the arguments of its `compile`."""

    model: keras.Model
    x: Any
    y: Any
    compiled_with: dict


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def normal(random, *shape):
    return random.normal(size=shape).astype("float32")


def uniform(random, *shape):
    return random.uniform(size=shape).astype("float32")


# A step of one's own.


class StepsByHand(keras.Model):
    if TENSORFLOW:

        def train_step(self, data):
            import tensorflow as tf

            x, y, *_ = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.metrics[0].update_state(loss)
            return {"loss": self.metrics[0].result()}

    else:

        def train_step(self, state, data):
            import jax

            weights, others, slots, metrics = state
            x, y, *_ = data

            def loss_of(weights, others):
                y_pred, others = self.stateless_call(weights, others, x, training=True)
                return self.compute_loss(x=x, y=y, y_pred=y_pred), others

            (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others)
            weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            metrics = self.metrics[0].stateless_update_state(metrics, loss)
            return {"loss": self.metrics[0].stateless_result(metrics)}, (weights, others, slots, metrics)


def own_train_step(random):
    inputs = keras.Input((8,))
    hidden = layers.BatchNormalization()(layers.Dense(16, activation="relu")(inputs))
    model = StepsByHand(inputs, layers.Dense(1)(hidden))
    return Stranger(model, normal(random, 16, 8), normal(random, 16, 1), {"optimizer": sgd(), "loss": "mse"})


class Adversaries(keras.Model):
    """Two models and two optimizers, and a `compile` that takes both."""

    def __init__(self, critic, artist, noise=4):
        super().__init__()
        self.critic = critic
        self.artist = artist
        self.noise = noise
        self.draws = keras.random.SeedGenerator()

    def compile(self, critic_optimizer, artist_optimizer, loss_fn):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.artist_optimizer = artist_optimizer
        self.loss_fn = loss_fn
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.artist_loss = keras.metrics.Mean(name="artist_loss")

    @property
    def metrics(self):
        return [self.critic_loss, self.artist_loss]

    def judge(self, images, real):
        return self.loss_fn(ops.full((len(images), 1), float(real)), self.critic(images, training=True))

    def make(self, count):
        return self.artist(keras.random.normal((count, self.noise), seed=self.draws), training=True)

    def descend(self, optimizer, part, loss_of):
        weights = part.trainable_variables
        if TENSORFLOW:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of()
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss
        import jax

        def pure(values):
            with keras.StatelessScope(state_mapping=zip(weights, values, strict=True)):
                return loss_of()

        loss, gradients = jax.value_and_grad(pure)([weight.value for weight in weights])
        optimizer.apply(gradients, weights)
        return loss

    def one_step(self, images):
        fake = self.make(len(images))
        critic_loss = self.descend(
            self.critic_optimizer, self.critic, lambda: self.judge(images, True) + self.judge(fake, False)
        )
        draws = keras.random.normal((len(images), self.noise), seed=self.draws)
        artist_loss = self.descend(
            self.artist_optimizer, self.artist, lambda: self.judge(self.artist(draws, training=True), True)
        )
        self.critic_loss.update_state(critic_loss)
        self.artist_loss.update_state(artist_loss)
        return {"critic_loss": self.critic_loss.result(), "artist_loss": self.artist_loss.result()}

    if TENSORFLOW:

        def train_step(self, images):
            return self.one_step(images[0] if isinstance(images, tuple) else images)

    else:

        def fit(self, images, y=None, epochs=1, **more):  # a loop of its own, for Keras's knows one optimizer
            history = keras.callbacks.History()
            history.history = {"critic_loss": [], "artist_loss": []}
            for _ in range(epochs):
                self.reset_metrics()
                for name, value in self.one_step(ops.convert_to_tensor(images)).items():
                    history.history[name].append(float(value))
            return history


def adversaries(random):
    critic = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, strides=2), layers.LeakyReLU(0.2), layers.Flatten(),
         layers.Dense(1)], name="critic",
    )  # fmt: skip
    artist = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16), layers.LayerNormalization(), layers.Reshape((4, 4, 1)),
         layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid")], name="artist",
    )  # fmt: skip
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizers = {"critic_optimizer": keras.optimizers.SGD(0.1), "artist_optimizer": keras.optimizers.SGD(0.1)}
    return Stranger(Adversaries(critic, artist), uniform(random, 8, 8, 8, 1), None, {**optimizers, "loss_fn": loss})


class Student(keras.Model):
    """Learns from a frozen teacher; its `compile` has arguments of its own."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, hard_loss, soft_loss, share=0.3, temperature=2.0):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.hard_loss = hard_loss
        self.soft_loss = soft_loss
        self.share = share
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        wise = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        soft = self.soft_loss(wise, ops.softmax(y_pred / self.temperature, axis=1))
        return self.share * self.hard_loss(y, y_pred) + (1 - self.share) * soft * self.temperature**2

    def call(self, x):
        return self.student(x)


def distilled(random):
    def classifier(width):
        return keras.Sequential([keras.Input((8,)), layers.Dense(width, activation="tanh"), layers.Dense(3)])

    model = Student(classifier(8), classifier(32))
    x, y = normal(random, 16, 8), random.integers(0, 3, 16)
    model(x)
    extra = {
        "hard_loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "soft_loss": keras.losses.KLDivergence(),
        "temperature": 3.0,
    }
    return Stranger(model, x, y, {"optimizer": sgd(), "metrics": ["accuracy"], **extra})


# Losses that layers add.


class Draw(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator()

    def call(self, inputs):
        mean, log_variance = inputs
        self.add_loss(-0.05 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * ops.cast(noise, mean.dtype)


class Variational(keras.Model):
    def __init__(self, size, latent=3):
        super().__init__()
        self.encoder = layers.Dense(16, activation="relu")
        self.mean = layers.Dense(latent)
        self.log_variance = layers.Dense(latent)
        self.draw = Draw()
        self.decoder = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(size, activation="sigmoid")])

    def call(self, x):
        hidden = self.encoder(x)
        return self.decoder(self.draw([self.mean(hidden), self.log_variance(hidden)]))


def variational(random):
    model = Variational(12)
    x = uniform(random, 16, 12)
    model(x)
    return Stranger(model, x, x, {"optimizer": sgd(), "loss": "binary_crossentropy"})


class Codebook(layers.Layer):
    """The nearest of some vectors; gradients pass through it."""

    def __init__(self, entries, width, beta=0.25):
        super().__init__()
        self.beta = beta
        self.vectors = self.add_weight(shape=(width, entries), initializer="random_uniform", name="vectors")

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        far = ops.sum(ops.square(self.vectors), 0) - 2 * ops.matmul(flat, self.vectors)
        chosen = ops.one_hot(ops.argmin(far, axis=1), self.vectors.shape[1], dtype=x.dtype)
        near = ops.reshape(ops.matmul(chosen, ops.transpose(self.vectors)), ops.shape(x))
        self.add_loss(ops.mean(ops.square(near - ops.stop_gradient(x))))
        self.add_loss(self.beta * ops.mean(ops.square(ops.stop_gradient(near) - x)))
        return x + ops.stop_gradient(near - x)


def vector_quantized(random):
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    hidden = Codebook(6, 4)(layers.Conv2D(4, 1)(hidden))
    hidden = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(hidden)
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(hidden))
    x = uniform(random, 4, 8, 8, 1)
    return Stranger(model, x, x, {"optimizer": sgd(), "loss": "mse"})


def sparse_autoencoder(random):
    inputs = keras.Input((12,))
    code = layers.Dense(6, activation="relu", activity_regularizer=keras.regularizers.L1(1e-3))(inputs)
    model = keras.Model(inputs, layers.Dense(12, kernel_regularizer="l2", activation="sigmoid")(code))
    x = uniform(random, 16, 12)
    return Stranger(model, x, x, {"optimizer": "adam", "loss": "mae"})


# Layers that are used twice.


def siamese(random):
    base = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(8)])
    left, right = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))

    def distance(pair):
        return ops.sqrt(ops.maximum(ops.sum(ops.square(pair[0] - pair[1]), axis=1, keepdims=True), 1e-6))

    apart = layers.Lambda(distance, output_shape=(1,))([base(left), base(right)])
    model = keras.Model([left, right], layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(apart)))

    def contrastive(margin):
        def loss(y_true, y_pred):
            y_true = ops.cast(y_true, y_pred.dtype)
            near = y_true * ops.square(ops.maximum(margin - y_pred, 0))
            return ops.mean((1 - y_true) * ops.square(y_pred) + near)

        return loss

    x = [normal(random, 8, 8, 8, 1), normal(random, 8, 8, 8, 1)]
    return Stranger(model, x, random.integers(0, 2, (8, 1)), {"optimizer": sgd(), "loss": contrastive(margin=1.0)})


class Untied(layers.Layer):
    """A Dense layer backwards: it takes another's kernel, and keeps a bias."""

    def __init__(self, dense, activation=None):
        super().__init__()
        self.dense = dense
        self.activation = keras.activations.get(activation)

    def build(self, shape):
        self.bias = self.add_weight(shape=(self.dense.kernel.shape[0],), initializer="zeros")

    def call(self, x):
        return self.activation(ops.matmul(x, ops.transpose(self.dense.kernel)) + self.bias)


def tied_autoencoder(random):
    inputs = keras.Input((12,))
    first, second = layers.Dense(8, activation="selu"), layers.Dense(4, activation="selu")
    code = second(first(inputs))
    model = keras.Model(inputs, Untied(first, activation="sigmoid")(Untied(second, activation="selu")(code)))
    x = uniform(random, 16, 12)
    return Stranger(model, x, x, {"optimizer": sgd(), "loss": "binary_crossentropy"})


def in_two_models(random):
    """Only the classifier trains; the autoencoder around the same encoder is there, too."""
    inputs = keras.Input((12,))
    encoder = keras.Sequential([layers.Dense(8, activation="gelu"), layers.LayerNormalization()], name="encoder")
    code = encoder(inputs)
    autoencoder = keras.Model(inputs, layers.Dense(12)(code))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(code))
    x, y = normal(random, 16, 12), random.integers(0, 3, 16)
    autoencoder.compile(sgd(), "mse", jit_compile=False)
    autoencoder.train_on_batch(x, x)
    return Stranger(model, x, y, {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy"})


# Sequences.


def translator(random):
    """Two recurrent halves with attention between them, and padding."""
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    read = layers.Embedding(12, 8, mask_zero=True)(source)
    read, state, cell = layers.LSTM(8, return_sequences=True, return_state=True)(read)
    said = layers.Embedding(12, 8, mask_zero=True)(target)
    said = layers.LSTM(8, return_sequences=True)(said, initial_state=[state, cell])
    context = layers.Attention()([said, read])
    logits = layers.Dense(12, activation="softmax")(layers.Concatenate()([said, context]))
    x = [random.integers(0, 12, (4, 5)), random.integers(0, 12, (4, 6))]
    settings = {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    return Stranger(keras.Model([source, target], logits), x, random.integers(0, 12, (4, 6)), settings)


class MinimalCell(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units
        self.state_size = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.loop = self.add_weight(shape=(self.units, self.units), initializer="orthogonal", name="loop")
        self.gate = layers.Dense(self.units, activation="sigmoid")
        self.gate.build(shape)

    def call(self, inputs, states):
        new = ops.tanh(ops.matmul(inputs, self.kernel) + ops.matmul(states[0], self.loop))
        share = self.gate(inputs)
        new = share * new + (1 - share) * states[0]
        return new, [new]


def own_cell(random):
    inputs = keras.Input((6, 4))
    hidden = layers.RNN(MinimalCell(8))(inputs)
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    return Stranger(model, normal(random, 8, 6, 4), normal(random, 8, 1), {"optimizer": sgd(), "loss": "mse"})


def tagger(random):
    """Padded steps, both directions, a layer at each step."""
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Masking(mask_value=0.0),
            layers.Bidirectional(layers.GRU(6, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(8, activation="swish")),
            layers.TimeDistributed(layers.Dense(3, activation="softmax")),
        ]
    )
    x = normal(random, 8, 6, 4)
    x[::2, 4:] = 0
    settings = {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy", "weighted_metrics": ["accuracy"]}
    return Stranger(model, x, random.integers(0, 3, (8, 6)), settings)


class Positions(layers.Layer):
    def __init__(self, length, words, width):
        super().__init__()
        self.words = layers.Embedding(words, width)
        self.places = layers.Embedding(length, width)

    def call(self, tokens):
        return self.words(tokens) + self.places(ops.arange(tokens.shape[-1]))


class EncoderBlock(layers.Layer):
    def __init__(self, width, heads, hidden, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.feedforward = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [layers.Dropout(rate) for _ in range(2)]

    def call(self, x, training=False):
        x = self.norms[0](x + self.drops[0](self.attention(x, x), training=training))
        return self.norms[1](x + self.drops[1](self.feedforward(x), training=training))


def text_transformer(random):
    inputs = keras.Input((7,), dtype="int32")
    x = EncoderBlock(8, 2, 16)(Positions(7, 20, 8)(inputs))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    settings = {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    return Stranger(model, random.integers(0, 20, (8, 7)), random.integers(0, 2, 8), settings)


class HandWrittenAttention(layers.Layer):
    """A causal head whose softmax is an operation in its own `call()`."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.project = {name: layers.Dense(width, use_bias=False) for name in ("query", "key", "value")}

    def call(self, x):
        query, key, value = (self.project[name](x) for name in ("query", "key", "value"))
        scores = ops.einsum("btd,bsd->bts", query, key) / math.sqrt(self.width)
        allowed = ops.tril(ops.ones(ops.shape(scores)[1:], "bool"))
        scores = ops.where(allowed, scores, ops.cast(-1e4, scores.dtype))
        return ops.matmul(ops.softmax(scores, axis=-1), value)


class SmallLanguageModel(keras.Model):
    def __init__(self, words, width=8, depth=2):
        super().__init__()
        self.embedding = layers.Embedding(words, width)
        self.heads = [HandWrittenAttention(width) for _ in range(depth)]
        self.norm = layers.RMSNormalization()
        self.out = layers.Dense(words)

    def call(self, tokens):
        x = self.embedding(tokens)
        for head in self.heads:
            x = x + head(self.norm(x))
        return self.out(x)


def language_model(random):
    model = SmallLanguageModel(16, width=12)
    x = random.integers(0, 16, (4, 6))
    model(x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Stranger(model, x, random.integers(0, 16, (4, 6)), {"optimizer": sgd(), "loss": loss})


# Images.


def u_net(random):
    inputs = keras.Input((8, 8, 3))
    x, skips = inputs, []
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.SpatialDropout2D(0.2)(layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    for filters, skip in zip((8, 4), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(layers.concatenate([x, skip]))
    model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(x))
    settings = {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy"}
    return Stranger(model, normal(random, 4, 8, 8, 3), random.integers(0, 3, (4, 8, 8)), settings)


class Tiles(layers.Layer):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, images):
        tiles = ops.image.extract_patches(images, self.size)
        return ops.reshape(tiles, (ops.shape(images)[0], -1, tiles.shape[-1]))


class WithPlaces(layers.Layer):
    def __init__(self, count, width):
        super().__init__()
        self.count = count
        self.project = layers.Dense(width)
        self.places = layers.Embedding(count, width)

    def call(self, tiles):
        return self.project(tiles) + self.places(ops.arange(self.count))


def vision_transformer(random):
    inputs = keras.Input((8, 8, 3))
    x = WithPlaces(4, 8)(Tiles(4)(inputs))
    for _ in range(2):
        norm = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(2, 4, dropout=0.1)(norm, norm), x])
        norm = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.Dense(8)(layers.Dense(16, activation=keras.activations.gelu)(norm)), x])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = {"optimizer": keras.optimizers.AdamW(1e-3), "loss": loss, "metrics": ["accuracy"]}
    model = keras.Model(inputs, layers.Dense(3)(x))
    return Stranger(model, normal(random, 8, 8, 8, 3), random.integers(0, 3, 8), settings)


class SpectralCritic(keras.Model):
    def __init__(self, filters=(4, 8)):
        super().__init__()
        self.blocks = [layers.SpectralNormalization(layers.Conv2D(n, 3, padding="same")) for n in filters]
        self.activation = layers.LeakyReLU(0.1)
        self.pool = layers.GlobalAveragePooling2D()
        self.score = layers.SpectralNormalization(layers.Dense(1))

    def call(self, x, training=None):
        for block in self.blocks:
            x = self.activation(block(x, training=training))
        return self.score(self.pool(x), training=training)


def spectral_critic(random):
    model = SpectralCritic()
    x = normal(random, 8, 8, 8, 1)
    model(x)
    return Stranger(model, x, random.choice([-1.0, 1.0], (8, 1)), {"optimizer": sgd(), "loss": "hinge"})


def augmented(random):
    normalization = layers.Normalization(axis=-1)
    x = uniform(random, 8, 8, 8, 3) * 255
    normalization.adapt(x)
    augmentation = keras.Sequential(
        [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.2)]
    )
    inputs = keras.Input((8, 8, 3))
    hidden = layers.Conv2D(4, 3, activation="relu")(augmentation(normalization(inputs)))
    hidden = layers.GlobalAveragePooling2D()(layers.GaussianNoise(0.1)(hidden))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
    return Stranger(model, x, random.integers(0, 3, 8), {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy"})


class DropPath(layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.seeds = keras.random.SeedGenerator()

    def call(self, x, training=None):
        if not training:
            return x
        keep = 1 - self.rate
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return x / keep * ops.cast(keras.random.uniform(shape, seed=self.seeds) < keep, x.dtype)


def stochastic_depth(random):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, padding="same")(inputs)
    for i in range(3):
        branch = layers.GroupNormalization(2)(layers.DepthwiseConv2D(3, padding="same")(x))
        branch = layers.Conv2D(6, 1)(layers.Conv2D(12, 1, activation="gelu")(branch))
        x = x + DropPath(0.1 * i)(branch)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Stranger(model, normal(random, 8, 8, 8, 3), random.integers(0, 3, 8), {"optimizer": sgd(), "loss": loss})


# Python's own means: dicts, lists, closures, lambdas, subclasses.


def dict_of_tasks(random):
    inputs = {"title": keras.Input((10,), name="title"), "tags": keras.Input((4,), name="tags")}
    x = layers.Concatenate()([layers.Dense(8, activation="relu")(inputs["title"]), inputs["tags"]])
    outputs = {
        "priority": layers.Dense(1, activation="sigmoid", name="priority")(x),
        "department": layers.Dense(3, activation="softmax", name="department")(x),
    }
    settings = {
        "optimizer": keras.optimizers.RMSprop(1e-3),
        "loss": {"priority": "binary_crossentropy", "department": "categorical_crossentropy"},
        "loss_weights": {"priority": 1.0, "department": 0.2},
        "metrics": {"department": ["accuracy"]},
    }
    y = {"priority": uniform(random, 8, 1), "department": np.eye(3, dtype="float32")[random.integers(0, 3, 8)]}
    x = {"title": normal(random, 8, 10), "tags": normal(random, 8, 4)}
    return Stranger(keras.Model(inputs, outputs), x, y, settings)


def lambdas(random):
    def scaled(factor):
        return lambda x: x * factor

    tail = keras.Sequential([layers.Dense(8, activation=lambda x: ops.maximum(x, 0.1 * x)), layers.Lambda(scaled(0.5))])
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.Sequential([layers.Dense(8, kernel_initializer=keras.initializers.HeNormal()), tail]),
            layers.BatchNormalization(),
            layers.Dense(3, activation=lambda x: ops.softmax(x, axis=-1)),
        ]
    )
    settings = {"optimizer": sgd(), "loss": lambda y, p: -ops.mean(ops.log(ops.sum(y * p, axis=-1) + 1e-4))}
    return Stranger(model, normal(random, 8, 8), np.eye(3, dtype="float32")[random.integers(0, 3, 8)], settings)


class Perceptron(keras.Sequential):
    def __init__(self, widths=(8, 8), classes=2):
        super().__init__()
        self.add(layers.Flatten())
        for width in widths:
            self.add(layers.Dense(width, activation="elu"))
            self.add(layers.BatchNormalization())
        self.add(layers.Dense(classes, activation="softmax"))


def own_sequential(random):
    model = Perceptron(widths=(12, 6), classes=3)
    model.build((None, 4, 2))
    settings = {"optimizer": sgd(), "loss": "sparse_categorical_crossentropy"}
    return Stranger(model, normal(random, 8, 4, 2), random.integers(0, 3, 8), settings)


def operations(random):
    """A graph of operations that are no layers."""
    inputs = keras.Input((6, 8))
    x = layers.Dense(8)(inputs)
    scores = ops.softmax(ops.einsum("btd,bsd->bts", x, ops.stop_gradient(x)) / 3.0, axis=-1)
    x = ops.matmul(scores, x) + inputs
    logits = layers.Dense(3)(ops.mean(x, axis=1))
    model = keras.Model(inputs, logits - ops.logsumexp(logits, axis=-1, keepdims=True))

    def likelihood(y, logs):
        return -ops.mean(ops.sum(ops.one_hot(y, 3) * logs, axis=-1))

    return Stranger(model, normal(random, 8, 6, 8), random.integers(0, 3, 8), {"optimizer": sgd(), "loss": likelihood})


class Experts(keras.Model):
    def __init__(self, count=2, width=4, activation="relu"):
        super().__init__()
        self.experts = [layers.Dense(width, activation=activation) for _ in range(count)]
        self.parts = {"gate": layers.Dense(count, activation="softmax"), "heads": [layers.Dense(1), layers.Dense(1)]}

    def call(self, x, training=False):
        mixture = ops.stack([expert(x) for expert in self.experts], axis=1)
        mixed = ops.sum(mixture * ops.expand_dims(self.parts["gate"](x), -1), axis=1)
        return ops.concatenate([head(mixed) for head in self.parts["heads"]], axis=-1)


def experts(random):
    model = Experts(count=3, activation="tanh")  # both are defaults to Keras's config
    x = normal(random, 16, 6)
    model(x)
    return Stranger(model, x, normal(random, 16, 2), {"optimizer": sgd(), "loss": keras.losses.Huber()})


class Residual(keras.Model):
    """Its `__init__` draws a graph, of arguments that no config shows."""

    def __init__(self, depth=1, activation="relu", rate=0.0):
        inputs = x = keras.Input((8,))
        for _ in range(depth):
            branch = layers.Dense(8, activation=activation)(layers.LayerNormalization()(x))
            x = layers.add([x, layers.Dropout(rate)(branch)])
        super().__init__(inputs, layers.Dense(1)(x))


def graph_in_init(random):
    model = Residual(depth=2, activation="tanh", rate=0.3)
    return Stranger(model, normal(random, 16, 8), normal(random, 16, 1), {"optimizer": sgd(), "loss": "mse"})


MODELS = {
    build.__name__: build
    for build in (
        own_train_step, adversaries, distilled, variational, vector_quantized, sparse_autoencoder, siamese,
        tied_autoencoder, in_two_models, translator, own_cell, tagger, text_transformer, language_model, u_net,
        vision_transformer, spectral_critic, augmented, stochastic_depth, dict_of_tasks, lambdas, own_sequential,
        operations, experts, graph_in_init,
    )
}  # fmt: skip
CLASSES = {
    cls.__name__: cls
    for cls in (
        StepsByHand, Adversaries, Student, Draw, Variational, Codebook, Untied, MinimalCell, Positions, EncoderBlock,
        HandWrittenAttention, SmallLanguageModel, Tiles, WithPlaces, SpectralCritic, DropPath, Perceptron, Experts,
        Residual,
    )
}  # fmt: skip
