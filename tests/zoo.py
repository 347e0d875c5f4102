"""Small models of every kind that the rebuild engine must handle; each builder follows the global policy."""

from collections.abc import Callable

import keras
import numpy as np
from keras import layers, ops

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


@keras.saving.register_keras_serializable("zoo")
class AddsLoss(layers.Layer):
    """Adds a loss in the dtype of its input; the sublayer that does so, too, is in no config."""

    def __init__(self, deep=True, **kwargs):
        super().__init__(**kwargs)
        self.inner = AddsLoss(deep=False) if deep else None

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x if self.inner is None else self.inner(2 * x)


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
    """Dense layers, a sum, a LayerNormalization."""
    inputs = keras.Input((8,), name="features")
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.LayerNormalization()(x + layers.Dense(16)(x))
    return keras.Model(inputs, layers.Dense(3)(x)), normal(5, 8)


@zoo
def sequential():
    """Two Dense layers."""
    return keras.Sequential([keras.Input((8,)), layers.Dense(4, "relu"), layers.Dense(2)]), normal(5, 8)


@zoo
def convolutional():
    """Convolutions of three kinds, BatchNormalization, pooling, augmentation."""
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
    """Two inputs and two outputs, in dicts."""
    a, b = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    x = layers.Concatenate()([layers.Dense(4)(a), layers.Dense(4)(b)])
    return keras.Model({"a": a, "b": b}, {"y": layers.Dense(2)(x), "x": x}), {"a": normal(5, 4), "b": normal(5, 6)}


@zoo
def nested_and_shared():
    """Two models in a model, which share a layer."""
    shared = layers.Dense(8, name="shared")
    first = keras.Sequential([keras.Input((8,)), shared, layers.BatchNormalization()], name="first")
    second = keras.Sequential([keras.Input((8,)), shared, layers.ReLU()], name="second")
    inputs = keras.Input((8,))
    x = second(first(inputs))
    x = keras.ops.cast(x, "bfloat16")  # a dtype that only the graph of operations holds
    return keras.Model(inputs, layers.Dense(2)(x)), normal(5, 8)


@zoo
def subclassed():
    """Layers in a list, and BatchNormalization."""
    model = Subclassed()
    batch = normal(5, 6)
    model(batch)
    return model, batch


@zoo
def subclass_inside_functional():
    """A subclassed model as a layer."""
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(Subclassed()(inputs))), normal(5, 6)


@zoo
def recurrent():
    """LSTM in both directions, GRU, stacked cells."""
    inputs = keras.Input((7, 4))
    plain = {"recurrent_initializer": "glorot_uniform"}  # Keras's orthogonal one fails in pure bfloat16
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True, **plain))(inputs)
    x = layers.GRU(5, return_sequences=True, **plain)(x)
    x = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4, **plain), layers.GRUCell(3, **plain)]))(x)
    return keras.Model(inputs, layers.Dense(2)(x)), normal(5, 7, 4)


@zoo
def attention():
    """MultiHeadAttention, GroupQueryAttention, EinsumDense."""
    inputs = keras.Input((6, 16))
    x = layers.MultiHeadAttention(2, 8, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    x = layers.GroupQueryAttention(8, 4, 2)(x, x)
    # Small, so that no score is large: a softmax multiplies the rounding of a score by its difference from the others.
    return keras.Model(inputs, layers.EinsumDense("abc,cd->abd", (None, 4))(x)), normal(3, 6, 16) / 4


@zoo
def preprocessing():
    """A Normalization that was adapted, Rescaling."""
    normalization = layers.Normalization()
    normalization.adapt(normal(100, 5) * 3 + 7)
    inputs = keras.Input((5,))
    x = layers.Rescaling(0.5, offset=1.0)(normalization(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), normal(4, 5) * 3 + 7


@zoo
def custom_layers():
    """Layers whose classes take and say what they like, a Lambda."""
    inputs = keras.Input((8,))
    x = Counts()(SaysNothingOfDtype(8)(RefusesDtype(8)(Scale(0.5)(inputs))))
    x = layers.Lambda(lambda tensor: tensor * 2.0)(x)
    return keras.Model(inputs, layers.Dense(2, activation=gelu_of_half)(x)), normal(5, 8)


@zoo
def adapted_text():
    """A TextVectorization that was adapted."""
    vectorize = layers.TextVectorization(output_sequence_length=6)
    vectorize.adapt(["bfloat16 is a word", "so is float16", "and mixed_float16"])
    inputs = keras.Input((), dtype="string", name="text")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(vectorize(inputs)))
    return keras.Model(inputs, layers.Dense(2)(x)), np.array(
        ["so is bfloat16", "a word", "nothing known"], dtype=object
    )


KINDS = tuple(MODELS)  # of which a config says everything

# Models as people write them by hand.


@keras.saving.register_keras_serializable("zoo")
class MinimalCell(layers.Layer):
    """A recurrent cell."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.state_size = self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")
        self.recurrent = self.add_weight(shape=(self.units, self.units), initializer="glorot_uniform")

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent))
        return h, [h]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@zoo
def own_cell():
    """Padded steps, in both directions, and a layer at each of them."""
    inputs = keras.Input((5, 4))
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(layers.Masking(0.0)(inputs))
    x = layers.RNN(MinimalCell(6), return_sequences=True)(layers.TimeDistributed(layers.Dense(6, "swish"))(x))
    x = layers.TimeDistributed(layers.Dense(3, activation="softmax"))(x)
    batch = normal(4, 5, 4)
    batch[::2, 3:] = 0
    return keras.Model(inputs, x), batch


@zoo
def translator():
    """Two recurrent halves of two inputs, with attention between them, and padding."""
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    read = layers.Embedding(12, 8, mask_zero=True)(source)
    read, state, cell = layers.LSTM(8, return_sequences=True, return_state=True)(read)
    said = layers.Embedding(12, 8, mask_zero=True)(target)
    said = layers.LSTM(8, return_sequences=True)(said, initial_state=[state, cell])
    x = layers.Concatenate()([said, layers.Attention()([said, read])])
    model = keras.Model([source, target], layers.Dense(12, activation="softmax")(x))
    return model, [rng().integers(0, 12, (3, 5)), rng().integers(0, 12, (3, 6))]


@zoo
def images():
    """A U-Net's halves and its skip, wrapped and grouped normalizations."""
    inputs = keras.Input((8, 8, 3))
    skip = layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same"))(inputs)
    x = layers.GroupNormalization(2)(layers.MaxPooling2D()(layers.LeakyReLU(0.2)(skip)))
    x = layers.Conv2DTranspose(4, 2, strides=2)(layers.Conv2D(6, 1, activation="gelu")(x))
    x = layers.SpatialDropout2D(0.2)(layers.concatenate([x, skip]))
    return keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(x)), normal(2, 8, 8, 3)


class Untied(layers.Layer):
    """A Dense layer backwards: it takes another's kernel, keeps a bias, and adds a loss."""

    def __init__(self, dense, activation=None):
        super().__init__()
        self.dense = dense
        self.activation = keras.activations.get(activation)

    def build(self, shape):
        self.bias = self.add_weight(shape=(self.dense.kernel.shape[0],), initializer="zeros")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return self.activation(ops.matmul(x, ops.transpose(self.dense.kernel)) + self.bias)


class Autoencoder(keras.Model):
    """Layers in lists and dicts; arguments that are defaults to Keras's config."""

    def __init__(self, count=2, width=4, activation="relu"):
        super().__init__()
        self.experts = [layers.Dense(width, activation=activation) for _ in range(count)]
        self.parts = {"gate": layers.Dense(count, activation="softmax"), "norm": layers.LayerNormalization()}
        self.code = layers.Dense(3, activation="selu")
        self.decoder = Untied(self.code, activation="selu")

    def call(self, x, training=False):
        mixture = ops.stack([expert(x) for expert in self.experts], axis=1)
        mixed = ops.sum(mixture * ops.expand_dims(self.parts["gate"](x), -1), axis=1)
        return self.decoder(self.code(self.parts["norm"](mixed)))


@zoo
def own_code():
    """Lists and dicts of layers, losses that a layer adds, another's kernel."""
    model = Autoencoder(count=3, activation="tanh")
    batch = normal(8, 6)
    model(batch)
    return model, batch


class Residual(keras.Model):
    """Its `__init__` draws a graph, of arguments that no config shows."""

    def __init__(self, depth=1, activation="relu"):
        inputs = x = keras.Input((8,))
        for _ in range(depth):
            x = layers.add([x, layers.Dense(8, activation=activation)(layers.LayerNormalization()(x))])
        super().__init__(inputs, layers.Dense(1)(x))


@zoo
def graph_in_init():
    """A subclass that draws its graph."""
    return Residual(depth=2, activation="tanh"), normal(8, 8)


def halved(x):
    return x * 0.5


def leaky(x):
    return ops.maximum(x, 0.1 * x)


@zoo
def operations():
    """A graph of operations that are no layers, and activations that are functions."""
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, activation=leaky)(inputs)
    scores = ops.softmax(ops.einsum("btd,bsd->bts", x, ops.stop_gradient(x)) / 3.0, axis=-1)
    x = layers.Lambda(halved)(ops.matmul(scores, x) + inputs)
    logits = layers.Dense(3)(ops.mean(x, axis=1))
    return keras.Model(inputs, logits - ops.logsumexp(logits, axis=-1, keepdims=True)), normal(4, 6, 8)


class StepsByHand(keras.Model):
    """A step of its own, on each backend."""

    if keras.backend.backend() == "tensorflow":

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


@zoo
def own_step():
    """A `train_step` of its own."""
    inputs = keras.Input((8,))
    x = layers.BatchNormalization()(layers.Dense(8, activation="relu")(inputs))
    return StepsByHand(inputs, layers.Dense(2)(x)), normal(8, 8)


class Student(keras.Model):
    """Learns from a frozen teacher; its `compile` has arguments of its own."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(self, optimizer, hard_loss, share=0.3, temperature=2.0, **more):
        super().compile(optimizer=optimizer, **more)
        self.hard_loss, self.share, self.temperature = hard_loss, share, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        wise = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        soft = keras.losses.KLDivergence()(wise, ops.softmax(y_pred / self.temperature, axis=1))
        return self.share * self.hard_loss(y, y_pred) + (1 - self.share) * soft * self.temperature**2

    def call(self, x):
        return self.student(x)


@zoo
def distilled():
    """A frozen teacher, a `compile` and a loss of its own."""

    def classifier(width):
        return keras.Sequential([keras.Input((8,)), layers.Dense(width, activation="tanh"), layers.Dense(3)])

    model, batch = Student(classifier(8), classifier(16)), normal(8, 8)
    model(batch)
    return model, batch


@keras.saving.register_keras_serializable("zoo")
class Block(layers.Layer):
    """A Transformer block whose layers its own code makes."""

    def __init__(self, width=8, heads=2, **arguments):
        super().__init__(**arguments)
        self.width, self.heads = width, heads
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = keras.Sequential([layers.Dense(2 * width, activation="gelu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.dense(self.norms[1](x))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "heads": self.heads}


@zoo
def gpt():
    """A Transformer block, a tied vocabulary."""
    tokens = keras.Input((6,), dtype="int32")
    table = layers.ReversibleEmbedding(16, 8)
    x = layers.RMSNormalization()(Block()(table(tokens)))
    return keras.Model(tokens, table(x, reverse=True)), rng().integers(0, 16, (3, 6))


def _of_kerashub(name, **sizes):
    """A causal language model of one block."""
    import keras_hub.models as hub

    sizes = {"vocabulary_size": 16, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1,
             "hidden_dim": 16, "intermediate_dim": 16, **sizes}  # fmt: skip
    backbone = getattr(hub, f"{name}Backbone")(**sizes)
    model = getattr(hub, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
    tokens = rng().integers(1, 16, (2, 6))
    return model, {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


@zoo
def experts():
    """KerasHub's Qwen3Moe, of 8 experts."""
    sizes = {"num_experts": 8, "top_k": 2, "moe_intermediate_dim": 8, "head_dim": 8}
    return _of_kerashub("Qwen3Moe", **sizes)


@zoo
def lora():
    """KerasHub's Llama with LoRA."""
    model, batch = _of_kerashub("Llama")
    model.backbone.enable_lora(2)
    return model, batch


@zoo
def int4_lora():
    """KerasHub's Gemma in int4 with LoRA."""
    model, batch = _of_kerashub("Gemma", head_dim=8)
    model.backbone.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=8))
    model.backbone.enable_lora(2)
    return model, batch


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
    return [name for name in KINDS if keras.backend.backend() == "tensorflow" or name not in TENSORFLOW_ONLY]
