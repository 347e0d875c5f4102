"""The operations of each layer, against a count by hand and against the dots of the lowered program."""

import keras
import numpy as np
import pytest
from faults import compiled, normal
from keras import layers

import keras_mp
from keras_mp import audit
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.read.program import read, read_module
from models.gpt import gpt
from models.transformer import Size

SIZE, VOCABULARY, LENGTH, BATCH = Size(2, 16, 2), 32, 12, 3


def lean_gpt():
    model = gpt(SIZE, VOCABULARY, LENGTH, vocabulary_multiple=VOCABULARY)
    model.compile("sgd", keras_mp.lean.ChunkedCrossEntropy())
    return model


def tokens():
    random = np.random.default_rng()
    return tuple(random.integers(0, VOCABULARY, (BATCH, LENGTH)).astype("int32") for _ in range(2))


def by_hand():
    """2 m n k of every product of the forward pass, by path."""
    rows, width = BATCH * LENGTH, SIZE.width
    flops = {"tokens_embedding": 2 * rows * width * VOCABULARY}
    for block in ("block1", "block2"):
        flops[f"{block}_attention/query_key_value"] = 2 * rows * width * 3 * width
        # The scores, and their product with the values: LENGTH x LENGTH of every head of every sequence.
        flops[f"{block}_attention"] = 2 * 2 * BATCH * SIZE.heads * LENGTH * LENGTH * (width // SIZE.heads)
        flops[f"{block}_attention/output"] = 2 * rows * width * width
        flops[f"{block}_dense_1"] = flops[f"{block}_dense_2"] = 2 * rows * width * 4 * width
    return flops


def test_every_product_of_the_lean_gpt():
    counted = {layer.path: layer.flops for layer in audit(lean_gpt(), tokens()).layers if layer.flops}
    assert counted == by_hand()


def in_the_program(model, x):
    """The operations of a lowered forward pass: its dots and convolutions, as `inspect` counts them."""
    return read(read_module(lower_step(model, x, training=False, chip=TracedChip("cpu")).module)).flops


class Products(layers.Layer):
    """Products of a layer of one's own."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))

    def call(self, x):
        y = keras.ops.tensordot(x, self.kernel, 1)
        y = y + keras.ops.dot(x, self.kernel)
        y = y + keras.ops.einsum("...i,ij", x, self.kernel)
        y = keras.ops.einsum("bti,bsi,bsj->btj", y, y, y)
        return keras.ops.matmul(keras.ops.matmul(y, keras.ops.swapaxes(y, 1, 2)), y)


IMAGE, SEQUENCE = (9, 8, 4), (6, 8)
LAYERS = {
    "EinsumDense": (lambda: layers.EinsumDense("abc,cde->abde", (6, 2, 3)), SEQUENCE),
    "Conv2D strides": (lambda: layers.Conv2D(6, (3, 2), strides=2, padding="same"), IMAGE),
    "Conv2D groups": (lambda: layers.Conv2D(6, 3, groups=2), IMAGE),
    "Conv1D causal": (lambda: layers.Conv1D(5, 3, padding="causal"), SEQUENCE),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), IMAGE),
    "Conv2DTranspose same": (lambda: layers.Conv2DTranspose(5, 3, strides=2, padding="same"), IMAGE),
    "LSTM": (lambda: layers.LSTM(5), SEQUENCE),
    "GRU unrolled": (lambda: layers.GRU(5, unroll=True, reset_after=False), SEQUENCE),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(5)), SEQUENCE),
    "Products": (Products, SEQUENCE),
}
if keras.backend.backend() == "jax":  # TensorFlow makes it a plain convolution of pieces, filled up with zeros
    LAYERS["Conv2D dilated"] = (lambda: layers.Conv2D(5, 3, dilation_rate=2, padding="same"), IMAGE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.jax if "Conv2D" in name else ()) for name in LAYERS]
)
def test_a_layer_counts_what_its_program_multiplies(name):
    build, shape = LAYERS[name]
    inputs = keras.Input(shape)
    outputs = build()(inputs)
    model = compiled(keras.Model(inputs, outputs))
    x, y = normal(2, *shape), normal(2, *outputs.shape[1:])
    counted = sum(layer.flops for layer in audit(model, (x, y)).layers)
    assert counted == in_the_program(model, x) > 0


@pytest.mark.parametrize("attention", [layers.MultiHeadAttention(2, 4), layers.GroupQueryAttention(4, 4, 2)])
def test_attention_of_keras_counts_its_two_products(attention):
    inputs = keras.Input(SEQUENCE)
    model = compiled(keras.Model(inputs, attention(inputs, inputs)))
    report = audit(model, (normal(2, *SEQUENCE), normal(2, *SEQUENCE)))
    heads = getattr(attention, "num_heads", None) or attention.num_query_heads
    core = sum(layer.flops for layer in report.layers if layer.path == attention.name)
    assert core == 2 * 2 * 2 * heads * 6 * 6 * 4


class TimesAList(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return keras.ops.einsum("ij,jk->ik", self.dense(x), [[1.0], [2.0]])


@pytest.mark.jax
def test_what_cannot_be_counted_fails_no_step():
    if keras.backend.backend() == "jax":  # Keras on TensorFlow takes no list there
        model, x = TimesAList(), np.ones((4, 2), "float32")
        model(x)
    else:
        model = keras.Sequential([keras.Input((None, 2)), layers.SimpleRNN(3), layers.Dense(1)])
        x = np.ones((4, 5, 2), "float32")
    model.compile("sgd", "mse")
    assert keras_mp.audit(model, (x, np.ones((4, 1), "float32"))).steps == 1
