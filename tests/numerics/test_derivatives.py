"""Second derivatives and forward mode of everything with a gradient of its own, against plain Keras in float32."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
import zoo
from derivatives import directional, distance, penalty_gradients, to_numpy
from gradients_of import MODES, value_and_gradients
from keras import layers, ops

import keras_mp
from keras_mp import fp8
from keras_mp.lean.blockwise_attention import attention
from keras_mp.lean.cross_entropy import chunked_cross_entropy
from keras_mp.lean.gelu import gelu
from keras_mp.stability.accumulate import einsum_float32
from keras_mp.stability.quantized_product import dequantized_weights

BACKEND = keras.backend.backend()
# The mode that compiles least, and what others are compared with; JAX traces the same in all.
FAST = "jit" if BACKEND == "jax" else "eager"
# A rounding of 16 bits is 2^-9 or 2^-12 at most; a second derivative is a sum of some products of rounded numbers.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.01}


class Kind(NamedTuple):
    """A function with a gradient of its own.

    Attributes:
        files: the files of the gradient, beneath `keras_mp/`.
        ours: the function.
        plain: the same by Keras's operations.
        shapes: the shapes of the arguments.
        dtypes: the dtypes that it is tried in.
    """

    files: tuple[str, ...]
    ours: object
    plain: object
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


def plain_attention(query, key, value, causal=False):
    group = query.shape[2] // key.shape[2]
    key, value = (ops.repeat(x, group, axis=2) for x in (key, value))
    scores = ops.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[3])
    if causal:
        scores = ops.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -1e30)
    return ops.einsum("bhts,bshd->bthd", ops.softmax(scores), value)


TARGETS, WEIGHTS = np.array([3, 0, 10, 3, 7, 9, 1]), np.array([1, 0.5, 2, 0, 1, 1, 3], "float32")


def our_loss(features, kernel, bias, rows=3):
    return chunked_cross_entropy(features, kernel, TARGETS, WEIGHTS, bias=bias, rows=rows)


def plain_loss(features, kernel, bias):
    logits = ops.matmul(features, kernel) + bias
    return ops.sum(ops.sparse_categorical_crossentropy(TARGETS, logits, from_logits=True) * WEIGHTS)


def block(x, kernel):
    return ops.tanh(ops.matmul(x, kernel))


LEAN_ATTENTION = ("lean/blockwise_attention.py", ((2, 5, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)))
KINDS = {
    "einsum_float32": Kind(
        ("stability/accumulate.py",),
        lambda left, right: einsum_float32("abc,cd->abd", left, right),
        lambda left, right: ops.einsum("abc,cd->abd", left, right),
        ((2, 3, 4), (4, 5)),
        ("bfloat16", "float16"),
    ),
    "gelu": Kind(("lean/gelu.py",), gelu, lambda x: ops.gelu(x, approximate=True), ((3, 5),)),
    "gelu by erf": Kind(
        ("lean/gelu.py",), lambda x: gelu(x, False), lambda x: ops.gelu(x, approximate=False), ((3, 5),), ("float32",)
    ),
    "attention": Kind(LEAN_ATTENTION[:1], attention, plain_attention, LEAN_ATTENTION[1]),
    "attention in blocks": Kind(
        LEAN_ATTENTION[:1],
        lambda *operands: attention(*operands, causal=True, block=3),
        lambda *operands: plain_attention(*operands, causal=True),
        LEAN_ATTENTION[1],
    ),
    "cross-entropy": Kind(
        ("lean/cross_entropy.py",), lambda *a: our_loss(*a, rows=None), plain_loss, ((7, 4), (4, 11), (11,))
    ),
    "cross-entropy in chunks": Kind(("lean/cross_entropy.py",), our_loss, plain_loss, ((7, 4), (4, 11), (11,))),
    "remat": Kind((f"lean/_{BACKEND}.py",), keras_mp.lean.remat(block), block, ((3, 4), (4, 5))),
    "remat of gelu": Kind(
        (f"lean/_{BACKEND}.py", "lean/gelu.py"),
        keras_mp.lean.remat(lambda x, kernel: gelu(ops.matmul(x, kernel))),
        lambda x, kernel: ops.gelu(ops.matmul(x, kernel), approximate=True),
        ((3, 4), (4, 5)),
        ("bfloat16",),
    ),
}
# What has no second derivatives, and says so; what makes the gradients of others; what the step of a sharded model has;
# what has its second derivatives tested elsewhere.
ELSEWHERE = {
    "fp8/_jax.py": "test_eight_bits_name_the_layer_and_the_way_out",
    "fp8/layers.py": "test_eight_bits_name_the_layer_and_the_way_out",
    "fp8/scaled_product.py": "test_eight_bits_name_the_layer_and_the_way_out",
    "lean/experts.py": "test_second_derivatives_and_forward_mode",
    "lean/lean_layers.py": "test_int4_layers",
    "stability/quantized_product.py": "test_logits_of_quantized_inputs",
    "qat/keras_modes.py": "straight through a rounding: by definition, and no derivative of it",
    "backend/tensorflow/tensors.py": "test_models",
    "lean/_tensorflow_step.py": "test_models",
    "lean/_tensorflow.py": "test_function",
    "fp8/_tensorflow.py": "test_eight_bits_name_the_layer_and_the_way_out",
    "backend/tensorflow/gradients.py": "test_function",
    "backend/jax/gradients.py": "test_function",
    "parallel/_jax_part.py": "of variables, in which a gradient is linear",
    "parallel/_jax.py": "of the loss of fit, of which nobody takes a second derivative",
}


def distances(kind, dtype, mode):
    """How far second derivatives and forward mode are from those of plain operations in float32."""
    # Of this size: where a tanh is nearly 1, its derivatives are little more than what rounding makes of its argument.
    arrays = [to_numpy(ops.cast(zoo.normal(*shape) / 2, dtype)) for shape in kind.shapes]
    directions = [to_numpy(zoo.normal(*shape)) for shape in kind.shapes]
    size = to_numpy(kind.plain(*map(ops.convert_to_tensor, arrays))).shape
    weights = zoo.normal(*size).astype("float32")

    def of(function, dtype):
        def outputs(*arguments):
            return ops.sin(ops.cast(function(*(ops.cast(x, dtype) for x in arguments)), "float32")) * weights

        return lambda *arguments: ops.sum(outputs(*arguments)), outputs

    (number, outputs), (plain_number, plain_outputs) = of(kind.ours, dtype), of(kind.plain, "float32")
    second = penalty_gradients(number, arrays, mode), penalty_gradients(plain_number, arrays, FAST)
    along, exact = (
        directional(function, arrays, directions, how) for function, how in ((outputs, mode), (plain_outputs, FAST))
    )
    # Of a single number, whose summands may cancel, in parts of what it could be.
    _, *first = value_and_gradients(plain_number, arrays, FAST)
    most = np.linalg.norm([np.linalg.norm(x) for x in first]) * np.linalg.norm([np.linalg.norm(d) for d in directions])
    size = np.linalg.norm(exact) if exact.size > 1 else most / 4
    return distance(*second), float(np.linalg.norm(along - exact) / size)


def _cases():
    for name, kind in KINDS.items():
        for dtype, mode in itertools.product(kind.dtypes, dict.fromkeys((FAST, MODES[-1]))):
            twice = name in ("attention", "cross-entropy") or "in " in name and dtype == "float32"
            slow = mode != FAST or twice or (BACKEND == "jax" and name == "attention in blocks")
            # What is jitted is traced as in eager mode: one of each kind is enough in continuous integration.
            rare = mode != FAST and dtype != kind.dtypes[-1]
            yield pytest.param(name, dtype, mode, marks=[pytest.mark.slow] * slow + [pytest.mark.rare] * rare)


@pytest.mark.jax
@pytest.mark.parametrize("name, dtype, mode", _cases())
def test_function(name, dtype, mode):
    second, forward = distances(KINDS[name], dtype, mode)
    assert second < TOLERANCES[dtype] and forward < TOLERANCES[dtype]


def model_of(policy, shape, *inside):
    keras.config.set_dtype_policy(policy)
    inputs = x = keras.Input(shape)
    for layer in inside:
        x = layer(x)
    return keras.Model(inputs, x)


class SelfAttention(layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)
        self.built = True

    def call(self, x):
        return self.attention(x, x)


MODELS = {
    "layer normalization": lambda: ((5,), layers.Dense(8), layers.LayerNormalization(), layers.Dense(3, "gelu")),
    "RMS normalization": lambda: ((5,), layers.Dense(8, "silu"), layers.RMSNormalization(), layers.Dense(3)),
    "batch normalization": lambda: ((5,), layers.Dense(8), layers.BatchNormalization(), layers.Dense(3)),
    "attention": lambda: ((4, 6), layers.EinsumDense("abc,cd->abd", (None, 6), bias_axes="d"), SelfAttention()),
    "softmax": lambda: ((4, 5), layers.EinsumDense("abc,cd->abd", (None, 8), activation="softmax"), layers.Dense(3)),
    "convolution": lambda: ((4, 4, 3), layers.Conv2D(64, 2, 2), layers.Conv2D(4, 2, 2), layers.Activation("silu")),
}


MODEL_CASES = [*((name, "mixed_bfloat16", FAST) for name in MODELS), ("attention", "float32", FAST)]
MODEL_CASES += [("softmax", "mixed_bfloat16", "jit")] * (FAST != "jit")
QUICK = MODEL_CASES[0], MODEL_CASES[3]


@pytest.mark.jax
@pytest.mark.parametrize(
    "name, policy, mode", [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in MODEL_CASES]
)
def test_models(name, policy, mode):
    """Of what `prepare` makes, which is stabilized and lean."""
    plain, model = (model_of(dtype, *MODELS[name]()) for dtype in ("float32", policy))
    model.set_weights(plain.get_weights())
    model = keras_mp.prepare(model, keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x, direction = (zoo.normal(6, *plain.input_shape[1:]) for _ in range(2))
    weights = zoo.normal(*plain(x).shape)

    def outputs_of(model):
        return lambda x: ops.sin(ops.cast(model(x, training=True), "float32")) * weights

    def off(model, mode):
        second = penalty_gradients(lambda x: ops.sum(outputs_of(model)(x)), [x], mode, model)
        return distance(second, exact), distance([directional(outputs_of(model), [x], [direction], mode)], [along])

    exact = penalty_gradients(lambda x: ops.sum(outputs_of(plain)(x)), [x], FAST, plain)
    along = directional(outputs_of(plain), [x], [direction], FAST)
    found, tolerance = off(model, mode), TOLERANCES["float32" if policy == "float32" else "bfloat16"]
    if max(found) >= tolerance and policy != "float32":
        # What was drawn may make rounding large: then it does so without the kit, too.
        rounded = model_of(policy, *MODELS[name]())
        rounded.set_weights(plain.get_weights())
        tolerance = 1.5 * max(off(rounded, FAST))
    assert max(found) < tolerance


@pytest.mark.jax
@pytest.mark.parametrize(
    "recipe, order",
    [
        *((recipe, "second") for recipe in ("delayed", "mxfp8", "int8", "nvfp4")),
        *((recipe, "forward") for recipe in ("current", "mxfp8")),
    ],
)
def test_eight_bits_name_the_layer_and_the_way_out(recipe, order):
    arrays = [zoo.normal(4, 32), zoo.normal(32, 16)]
    named = r"the layer 'one/dense' .* keras_mp\.revert\(model, 'convert'\)"

    def multiply(x, kernel):
        return ops.sin(ops.cast(fp8.matmul(ops.cast(x, "bfloat16"), kernel, recipe, path="one/dense"), "float32"))

    with pytest.raises(NotImplementedError, match=named):
        if order == "second":
            penalty_gradients(lambda *operands: ops.sum(multiply(*operands)), arrays, FAST)
        else:
            directional(multiply, arrays, arrays, FAST)
    value_and_gradients(lambda *operands: ops.sum(multiply(*operands)), arrays, FAST)  # the first derivative is there


@pytest.mark.jax
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_logits_of_quantized_inputs(mode):
    tokens, embedding = keras.Input((4,), dtype="int32"), layers.ReversibleEmbedding(12, 8, name="embedding")
    model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
    embedding.quantize(mode)
    embedding = keras_mp.stabilize(model).get_layer("embedding")

    def logits(x):
        return ops.cast(embedding(x, reverse=True), "float32")

    kernel = to_numpy(logits(np.eye(8, dtype="float32")[None]))[0]
    x, direction, weights = zoo.normal(2, 4, 8), zoo.normal(2, 4, 8), zoo.normal(2, 4, 12)
    second = (
        penalty_gradients(lambda x, function=function: ops.sum(ops.sin(function(x)) * weights), [x], FAST)
        for function in (logits, lambda x: ops.matmul(x, kernel))
    )
    assert distance(*second) < 0.03  # the sine is of inputs that are rounded to 8 bits
    along = directional(logits, [x], [direction], FAST)
    np.testing.assert_allclose(along, direction @ kernel, atol=1e-4)


@pytest.mark.jax
def test_int4_layers():
    plain = keras.Sequential([keras.Input((16,)), layers.Dense(5, "tanh", name="dense")])
    plain.get_layer("dense").quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=8))
    lean = keras_mp.lean.make_lean(plain)
    kernel = to_numpy(dequantized_weights(lean.get_layer("dense"), "float32"))
    functions = (lambda x: lean(x, training=True)), (lambda x: ops.tanh(ops.matmul(x, kernel)))
    x, direction = zoo.normal(3, 16), zoo.normal(3, 16)
    ours, exact = (penalty_gradients(lambda x, f=f: ops.sum(f(x)), [x], FAST) for f in functions)
    assert distance(ours, exact) < 1e-4
    along = [directional(function, [x], [direction], FAST) for function in functions]
    np.testing.assert_allclose(*along, atol=1e-5)


def test_no_gradient_is_left_out():
    """The table above has a row for each file of the kit that gives a function a gradient of its own."""
    root = Path(keras_mp.__file__).parent
    own = re.compile(
        r"^ *@?(own = )?(backend|keras\.ops|tf|jax)\.(custom_gradient|custom_vjp|custom_jvp)\b", re.MULTILINE
    )
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if own.search(path.read_text())}
    covered = {file for kind in KINDS.values() for file in kind.files} | set(ELSEWHERE)
    assert found - covered == set()
