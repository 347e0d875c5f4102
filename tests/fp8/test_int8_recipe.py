"""INT8 products: each integer and scale against NumPy, non-finite tensors, and sums that exceed INT32."""

import functools

import keras
import numpy as np
import pytest
from hashed import words
from int8_reference import TOP, amax, divided, integers, scale_of, variable
from reference import compiled, normal, quantized_by, tensors, to_numpy, with_gradients

from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.scaled_product import MOST_TERMS

PATH = "block/dense"
BACKEND = keras.backend.backend()
ALL_INT8 = Scalings.named("int8", kernel_gradient=True)


@functools.cache
def program(recipe, equation="", jit=True):
    """Operands of one shape and dtype share what is compiled."""

    def run(x, w, g, *history):
        multiply = functools.partial(matmul, scaling=recipe, path=PATH, equation=equation)
        return with_gradients(functools.partial(multiply, history=history[0] if history else None))(x, w, g)

    return compiled(run) if jit else run


def product(recipe, x, w, g, dtype="float32", history=None, **options):
    """Result and gradients, in float64."""
    operands = *tensors(x, dtype=dtype), *tensors(w), *tensors(g, dtype=dtype)
    known = [] if history is None else tensors(history)
    return [to_numpy(each) for each in program(recipe, **options)(*operands, *known)]


def quantized(x, step=None, seed=0, margin=0):
    """Integers and the scale; a gradient's with the words of a step."""
    scale = scale_of(amax(x), margin)
    bits = None if step is None else words(np.shape(x), seed, step, variable(PATH))
    return integers(x, scale, bits), scale


OPERANDS = {
    "normal": lambda: (normal(6, 16), normal(16, 8), normal(6, 8)),
    "one row and one column": lambda: (normal(1, 16), normal(16, 1), normal(1, 1)),
    "one term": lambda: (normal(6, 1), normal(1, 8), normal(6, 8)),
    "zeros": lambda: (np.zeros((6, 16), "float32"), normal(16, 8), np.zeros((6, 8), "float32")),
    "huge": lambda: (normal(6, 16) * 1e37, normal(16, 8) * 1e-9, normal(6, 8) * 1e-3),
    "huge gradient": lambda: (normal(6, 16) * 1e-3, normal(16, 8) * 1e-9, normal(6, 8) * 1e37),
    "tiny": lambda: (normal(6, 16) * 1e-30, normal(16, 8) * 1e9, normal(6, 8)),
    "tiny gradient": lambda: (normal(6, 16), normal(16, 8) * 1e9, normal(6, 8) * 1e-30),
}
OUT_OF_A_PROGRAM = [("normal", False)] if BACKEND == "tensorflow" else []


@pytest.mark.jax
@pytest.mark.parametrize("name, jit", [*((name, True) for name in OPERANDS), *OUT_OF_A_PROGRAM])
def test_every_integer_and_scale(name, jit):
    x, w, g = OPERANDS[name]()
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    y, dx, dw = product(ALL_INT8, x, w, g, jit=jit)
    np.testing.assert_array_equal(y, divided(x8 @ w8, sx, sw))
    np.testing.assert_array_equal(dx, divided(g8 @ w8.T, sg, sw))
    np.testing.assert_array_equal(dw, divided(x8.T @ g8, sx, sg))


@pytest.mark.jax
def test_a_kernel_gradient_of_floats():
    x, w, g = OPERANDS["normal"]()
    y, dx, dw = product(Scalings.named("int8"), x, w, g)
    np.testing.assert_equal([y, dx], product(ALL_INT8, x, w, g)[:2])
    exact, terms = x.T.astype("float64") @ g, np.abs(x.T.astype("float64")) @ np.abs(g)
    assert np.all(np.abs(dw - exact) <= len(x) * 2.0**-23 * terms)


def test_a_kernel_gradient_in_bfloat16_that_is_transposed():
    """XLA for CPUs in TensorFlow refused it, bfloat16 with float32 sums, in the step of a GPT."""
    x, w, g = normal(4, 32, 128), normal(128, 64), normal(4, 32, 64)
    x, g = (to_numpy(*tensors(each, dtype="bfloat16")).astype("float32") for each in (x, g))

    def run(x, w, g):
        x, g = (keras.ops.cast(each, "bfloat16") for each in (x, g))
        return keras.ops.transpose(with_gradients(lambda x, w: matmul(x, w, Scalings.named("int8")))(x, w, g)[2])

    dw = to_numpy(compiled(run)(*tensors(x, w, g))).T
    exact, terms = (np.einsum("abc,abd->cd", x64, g64) for x64, g64 in ((x.astype("float64"), g), (abs(x), abs(g))))
    assert np.all(np.abs(dw - exact) <= 128 * 2.0**-23 * terms)


@pytest.mark.jax
def test_the_integers_themselves():
    """Of each role, with a step and a seed, through `quantize`; the top is 127 on both sides."""
    x = np.concatenate([normal(7, 9), [[1e3, -1e3, 0.5, -0.5, 2.5, 0.0, -0.0, 1.5, -1.5]]]).astype("float32")
    recipe = Scalings.named("int8", seed=2**40 + 3, margin=1)
    steps = 2**24 - 2
    history = np.array([0.0] * 15 + [200.0, steps], "float32")  # the last entry is the number of steps
    for role in ("input", "kernel", "gradient"):
        quantize = compiled(lambda x, row, role=role: quantized_by(recipe, x, role, None, row, variable(PATH)))
        values, scale = quantize(*tensors(x, history))
        expected_scale = scale_of(200.0, 1)
        bits = words(x.shape, 2**40 + 3, steps, variable(PATH)) if role == "gradient" else None
        np.testing.assert_array_equal(to_numpy(values), integers(x, expected_scale, bits))
        assert keras.backend.standardize_dtype(values.dtype) == "int8"
        assert float(scale) == expected_scale
        assert to_numpy(values).max() == TOP and to_numpy(values).min() == -TOP


def test_bfloat16_tensors_and_a_kernel_in_float32():
    x, w, g = (to_numpy(keras.ops.cast(each, "bfloat16")).astype("float32") for each in OPERANDS["normal"]())
    w = w + 2.0**-12
    y, dx, dw = product(ALL_INT8, x, w, g, dtype="bfloat16")
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    for actual, exact in ((y, divided(x8 @ w8, sx, sw)), (dx, divided(g8 @ w8.T, sg, sw))):
        np.testing.assert_array_equal(actual, to_numpy(keras.ops.cast(exact, "bfloat16")))
    np.testing.assert_array_equal(dw, divided(x8.T @ g8, sx, sg))  # not rounded to 16 bits


@pytest.mark.jax
def test_scales_by_row_and_column():
    x, w, g = normal(6, 16), normal(16, 8), normal(6, 8)
    x[2], x[4] = 0, 1e6 * x[4]
    y, dx, dw = product(Scalings.named("int8_current", kernel_gradient=True), x, w, g)

    def operand(x, axis, gradient=False):
        scale = scale_of(amax(x, axis))
        return integers(x, scale, words(x.shape, 0, 0, variable(PATH)) if gradient else None), scale

    def scaled(left, right):
        rows, columns = np.float32(1) / left[1], np.float32(1) / right[1]
        return ((left[0] @ right[0]).astype("float32") * rows) * columns

    np.testing.assert_array_equal(y, scaled(operand(x, 1), operand(w, 0)))
    by_row = operand(w, 1)
    np.testing.assert_array_equal(dx, scaled(operand(g, 1, True), (by_row[0].T, by_row[1].T)))
    by_column = operand(x, 0)
    np.testing.assert_array_equal(dw, scaled((by_column[0].T, by_column[1].T), operand(g, 0, True)))


def test_an_einsum_that_splits_features_into_heads():
    x, w, g = normal(2, 3, 8), normal(8, 2, 4), normal(2, 3, 2, 4)
    y, dx, dw = product(ALL_INT8, x, w, g, equation="abc,cde->abde")
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    np.testing.assert_array_equal(y, divided(np.einsum("abc,cde->abde", x8, w8), sx, sw))
    np.testing.assert_array_equal(dx, divided(np.einsum("abde,cde->abc", g8, w8), sg, sw))
    np.testing.assert_array_equal(dw, divided(np.einsum("abc,abde->cde", x8, g8), sx, sg))


@pytest.mark.jax
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("scales", ["delayed", "current"])
def test_what_is_not_finite_is_never_a_silent_integer(scales, bad):
    own = {"granularity": "row", "source": "current"} if scales == "current" else {"source": scales}
    recipe = Scalings.named("int8", kernel_gradient=True, **own)
    # As after many steps: the scales are known, and need not look at the tensors.
    history = np.ones((3, recipe.columns), "float32") * 100
    for spoiled in range(3):
        operands = [normal(6, 16), normal(16, 8), normal(6, 8)]
        operands[spoiled][3, 5] = bad
        y, dx, dw = product(recipe, *operands, history=history)
        for result in {0: (y, dw), 1: (y, dx), 2: (dx, dw)}[spoiled]:
            if scales == "current":
                wrong = ~np.isfinite(result)
                assert wrong.any() and not wrong.all()  # its row or column
            else:
                assert not np.isfinite(result).any()


@pytest.mark.jax
def test_gradients_are_rounded_without_bias_and_anew_in_each_step():
    recipe = Scalings.named("int8")
    g = np.full((1, 4096), 10.25, "float32")
    g[0, 0] = 127.0
    quantize = compiled(lambda g, row: quantized_by(recipe, g, "gradient", None, row, 1).values)
    values = []
    for step in range(16):
        history = np.array([127.0] * 16 + [step], "float32")
        values.append(to_numpy(quantize(*tensors(g, history)))[0])
    values = np.array(values)
    assert np.all(values[:, 0] == 127) and set(np.unique(values[:, 1:])) == {10, 11}
    # Four standard deviations of the mean of 65,520 words.
    assert abs(values[:, 1:].mean() - 10.25) < 4 * np.sqrt(0.25 * 0.75 / values[:, 1:].size)
    assert all(np.any(values[0] != row) for row in values[1:])


def test_a_product_of_too_many_terms_is_not_wrapped():
    terms = MOST_TERMS + 1
    x, w, g = np.ones((1, terms), "float32"), np.full((terms, 1), 1.0, "float32"), np.ones((1, 1), "float32")
    y, dx, dw = product(ALL_INT8, x, w, g)
    np.testing.assert_allclose(y, terms, rtol=1e-6)
    x, g = np.ones((terms, 1), "float32"), np.ones((terms, 1), "float32")
    _, _, dw = product(ALL_INT8, x, np.ones((1, 1), "float32"), g)
    np.testing.assert_allclose(dw, terms, rtol=1e-6)
    assert MOST_TERMS * TOP**2 < 2**31 <= (MOST_TERMS + 1) * TOP**2


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX knows every size when it traces")
def test_a_batch_of_unknown_size_with_too_many_rows_is_nan():
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((None, 1))], autograph=False)
    def kernel_gradient(x):
        w = tf.ones((1, 1))
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = matmul(x, w, ALL_INT8)
        return tape.gradient(y, w)

    np.testing.assert_allclose(kernel_gradient(tf.ones((8, 1))), 8.0)
    assert np.isnan(kernel_gradient(tf.ones((MOST_TERMS + 1, 1)))).all()
