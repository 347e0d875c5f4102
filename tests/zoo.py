"""Small models of every kind that the rebuild engine must handle; each builder follows the global policy."""

from collections.abc import Callable

import keras
import numpy as np
from keras import layers

MODELS: dict[str, Callable] = {}


def zoo(build: Callable) -> Callable:
    MODELS[build.__name__] = build
    return build


def rng() -> np.random.Generator:
    return np.random.default_rng()  # fresh numbers each time: nothing here may depend on lucky ones


def normal(*shape: int) -> np.ndarray:
    return rng().normal(size=shape).astype("float32")


@keras.saving.register_keras_serializable("zoo")
class Scale(layers.Layer):
    """A custom layer with Keras's usual config."""

    def __init__(self, start=1.0, **kwargs):
        super().__init__(**kwargs)
        self.start = start

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="random_normal", name="scale")

    def call(self, inputs):
        return inputs * (self.start + self.scale)

    def get_config(self):
        return {**super().get_config(), "start": self.start}


class RefusesDtype(layers.Layer):
    """A custom layer that is not registered, and whose `__init__` takes no `dtype`."""

    def __init__(self, units, name=None, trainable=True):
        super().__init__(name=name, trainable=trainable)
        self.units = units
        self.dense = layers.Dense(units)

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, inputs):
        return self.dense(inputs)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("zoo")
class RegisteredScale(Scale):
    """Registered, but only once this module has been imported."""


class SaysNothingOfDtype(layers.Layer):
    """A custom layer whose config holds its own arguments alone."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = keras.Sequential([layers.Dense(units, activation="relu"), layers.Dense(units)])

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, inputs):
        return self.inner(inputs)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {"units": self.units, "name": self.name}


class NoConfig(layers.Layer):
    """A custom layer that cannot be serialized: it has an argument of no plain type, and no get_config()."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, inputs):
        return inputs


class Counts(layers.Layer):
    """A custom layer that saves more than its variables."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = 0

    def call(self, inputs):
        return inputs

    def save_own_variables(self, store):
        store["seen"] = np.array(self.seen)

    def load_own_variables(self, store):
        self.seen = int(store["seen"])


class Subclassed(keras.Model):
    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.first = layers.Dense(width, activation="gelu")
        self.blocks = [layers.Dense(width) for _ in range(2)]
        self.norm = layers.BatchNormalization()

    def call(self, inputs, training=False):
        x = self.first(inputs)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x, training=training)

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def gelu_of_half(x):
    return keras.activations.gelu(x * 0.5)


@zoo
def functional():
    inputs = keras.Input((8,), name="features")
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.LayerNormalization()(x + layers.Dense(16)(x))
    return keras.Model(inputs, layers.Dense(3)(x)), normal(5, 8)


@zoo
def sequential():
    return keras.Sequential([keras.Input((8,)), layers.Dense(4, "relu"), layers.Dense(2)]), normal(5, 8)


@zoo
def convolutional():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.RandomFlip(),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3),
            layers.SeparableConv2D(8, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )
    return model, normal(3, 12, 12, 3)


@zoo
def dict_of_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    x = layers.Concatenate()([layers.Dense(4)(a), layers.Dense(4)(b)])
    return keras.Model({"a": a, "b": b}, {"y": layers.Dense(2)(x), "x": x}), {"a": normal(5, 4), "b": normal(5, 6)}


@zoo
def nested_and_shared():
    shared = layers.Dense(8, name="shared")
    first = keras.Sequential([keras.Input((8,)), shared, layers.BatchNormalization()], name="first")
    second = keras.Sequential([keras.Input((8,)), shared, layers.ReLU()], name="second")
    inputs = keras.Input((8,))
    x = second(first(inputs))
    x = keras.ops.cast(x, "bfloat16")  # a dtype that only the graph of operations holds
    return keras.Model(inputs, layers.Dense(2)(x)), normal(5, 8)


@zoo
def subclassed():
    model = Subclassed()
    batch = normal(5, 6)
    model(batch)
    return model, batch


@zoo
def subclass_inside_functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(Subclassed()(inputs))), normal(5, 6)


@zoo
def recurrent():
    inputs = keras.Input((7, 4))
    plain = {"recurrent_initializer": "glorot_uniform"}  # Keras's orthogonal one fails in pure bfloat16
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True, **plain))(inputs)
    x = layers.GRU(5, return_sequences=True, **plain)(x)
    x = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4, **plain), layers.GRUCell(3, **plain)]))(x)
    return keras.Model(inputs, layers.Dense(2)(x)), normal(5, 7, 4)


@zoo
def attention():
    inputs = keras.Input((6, 16))
    x = layers.MultiHeadAttention(2, 8, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    x = layers.GroupQueryAttention(8, 4, 2)(x, x)
    # Small, so that no score is large: a softmax multiplies the rounding of a score by its difference from the others.
    return keras.Model(inputs, layers.EinsumDense("abc,cd->abd", (None, 4))(x)), normal(3, 6, 16) / 4


@zoo
def tokens():
    inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(20, 8)(inputs)
    x = layers.TimeDistributed(layers.Dense(8))(layers.SpatialDropout1D(0.2)(x))
    return keras.Model(inputs, layers.Dense(20)(layers.GlobalMaxPooling1D()(x))), rng().integers(0, 20, (5, 9))


@zoo
def preprocessing():
    normalization = layers.Normalization()
    normalization.adapt(normal(100, 5) * 3 + 7)
    inputs = keras.Input((5,))
    x = layers.Rescaling(0.5, offset=1.0)(normalization(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), normal(4, 5) * 3 + 7


@zoo
def custom_layers():
    inputs = keras.Input((8,))
    x = Counts()(SaysNothingOfDtype(8)(RefusesDtype(8)(Scale(0.5)(inputs))))
    x = layers.Lambda(lambda tensor: tensor * 2.0)(x)
    return keras.Model(inputs, layers.Dense(2, activation=gelu_of_half)(x)), normal(5, 8)


@zoo
def tied():
    embedding = layers.Embedding(12, 8, name="embedding")
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Dense(8)(embedding(inputs))
    x = layers.ReversibleEmbedding(12, 8, name="head")(x, reverse=True) if hasattr(layers, "ReversibleEmbedding") else x
    return keras.Model(inputs, x), rng().integers(0, 12, (3, 4))


@zoo
def adapted_text():
    vectorize = layers.TextVectorization(output_sequence_length=6)
    vectorize.adapt(["bfloat16 is a word", "so is float16", "and mixed_float16"])
    inputs = keras.Input((), dtype="string", name="text")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(vectorize(inputs)))
    return keras.Model(inputs, layers.Dense(2)(x)), np.array(
        ["so is bfloat16", "a word", "nothing known"], dtype=object
    )


TENSORFLOW_ONLY = {"adapted_text"}  # strings: Keras has them on TensorFlow alone


def build(name: str, policy: str):
    """The named model under a policy, its weights away from their initial values, and a batch for it."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, batch = MODELS[name]()
    finally:
        keras.config.set_dtype_policy(before)
    for variable in model.weights:
        if keras.backend.is_float_dtype(variable.dtype) and variable.name not in ("mean", "variance"):
            noise = rng().uniform(0.05, 0.2, size=tuple(variable.shape))  # positive: a variance must stay one
            variable.assign(keras.ops.convert_to_numpy(variable) + noise)
    return model, batch


def names() -> list[str]:
    return [name for name in MODELS if keras.backend.backend() == "tensorflow" or name not in TENSORFLOW_ONLY]
