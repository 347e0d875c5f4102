"""The three products against NumPy, and what breaks them."""

import re

import keras
import numpy as np
import pytest
from reference import (
    Product,
    assert_close,
    compiled,
    normal,
    product,
    quantize,
    sqnr,
    tensors,
    to_numpy,
    with_gradients,
)

from keras_mp.fp8 import Scalings, matmul
from keras_mp.stability.accumulate import last_axis

pytestmark = pytest.mark.jax

BACKEND = keras.backend.backend()
E4M3_EVERYWHERE = Scalings.named("current", format="E4M3", scale="power_of_two")
# Of 32 samples, 16 features and 3 units: these share a compiled program.
of_one_shape = compiled(with_gradients(matmul))
of_another_shape = compiled(with_gradients(matmul))


def check(x, w, g, run, equation="", formats=("E4M3", "E4M3", "E5M2"), power_of_two=False):
    """Compares what `run` makes of x, w and g with NumPy."""
    results = run(*tensors(x, w, g))
    expected = Product(equation or last_axis(np.ndim(x)), x, w, g, formats, power_of_two)
    for actual, own in zip(results, (expected.result, expected.input_gradient, expected.kernel_gradient), strict=True):
        assert_close(actual, own)
    return [to_numpy(each) for each in results]


PRODUCTS = [
    ("", (24,), (24, 7), None),
    ("", (3, 2, 5, 8), (8, 7), E4M3_EVERYWHERE),
    ("", (1, 16), (16, 1), None),
    ("", (5, 1), (1, 4), E4M3_EVERYWHERE),
    ("abcd,cde->abe", (2, 3, 2, 4), (2, 4, 8), None),
    ("btd,ndh->btnh", (2, 3, 8), (2, 8, 4), E4M3_EVERYWHERE),
    ("abcd,dcef->afbe", (2, 3, 4, 5), (5, 4, 6, 7), None),
]
# Out of a compiled program; JAX compiles each operation for itself there, at a tenth of a second each.
EAGER = [(*case, "eager") for case in PRODUCTS[1:2]] if BACKEND == "tensorflow" else []


@pytest.mark.parametrize("equation, x, w, recipe, mode", [(*case, "jit") for case in PRODUCTS] + EAGER)
def test_any_product(equation, x, w, recipe, mode):
    run = with_gradients(lambda x, w: matmul(x, w, recipe, equation=equation))
    x, w = normal(*x), normal(*w)
    g = normal(*np.einsum(equation or last_axis(x.ndim), x, w).shape)
    settings = {"formats": ("E4M3",) * 3, "power_of_two": True} if recipe else {}
    check(x, w, g, compiled(run) if mode == "jit" else run, equation, **settings)


def test_an_ellipsis_stands_for_any_axes():
    x, w = normal(2, 3, 4, 8), normal(8, 5)
    result = compiled(lambda x, w: matmul(x, w, equation="...x, xy->...y"))(*tensors(x, w))
    assert_close(result, product("abcx,xy->abcy", quantize(x, "E4M3"), quantize(w, "E4M3")))


SEVERAL = ["current", "rowwise", "mxfp8", "nvfp4", "int8"]


@pytest.mark.parametrize("recipe", SEVERAL)
def test_an_empty_batch(recipe):
    run = with_gradients(lambda x, w: matmul(x, w, recipe))
    # On TensorFlow the next test compiles it.
    result, to_x, to_w = (compiled(run) if BACKEND == "jax" else run)(
        *tensors(np.zeros((3, 0, 16)), normal(16, 4), np.zeros((3, 0, 4)))
    )
    assert result.shape == (3, 0, 4) and to_x.shape == (3, 0, 16)
    np.testing.assert_array_equal(to_numpy(to_w), np.zeros((16, 4)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX knows every size when it compiles")
@pytest.mark.parametrize("recipe, jit", [("rowwise", False), ("current", True), ("nvfp4", True), ("int8", True)])
def test_an_unknown_batch_size_gives_the_products_of_a_known_one(recipe, jit):
    import tensorflow as tf

    run = with_gradients(lambda x, w: matmul(x, w, recipe))
    signature = [tf.TensorSpec((None, None, 40)), tf.TensorSpec((40, 4)), tf.TensorSpec((None, None, 4))]
    unknown = tf.function(run, signature, jit_compile=jit, autograph=False)
    for sizes in ((7, 2), (0, 3)) if jit else ((1, 1), (7, 2), (0, 3)):
        operands = tensors(normal(*sizes, 40), normal(40, 4), normal(*sizes, 4))
        results = unknown(*operands)
        if 0 in sizes:
            assert results[0].shape == (*sizes, 4) and not to_numpy(results[2]).any()
            continue
        for found, expected in zip(results, run(*operands), strict=True):
            np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e-30])
def test_tiny_gradients_are_not_lost(scale):
    """A loss of 1e-6 gives gradients far below what FP8 can hold; the scale brings them back."""
    # The noise of 48 gradients is 24.6 dB below them on average, and 1 in 100 samples of them is above 22.
    x, w, g = normal(64, 48), normal(48, 32), normal(64, 32) * np.float32(scale)
    _, _, to_w = check(x, w, g, of_another_shape)
    assert sqnr(to_w, x.astype("float64").T @ g.astype("float64")) >= 22


@pytest.mark.parametrize("large", [1e10, 1e30])
def test_huge_values_of_one_operand(large):
    check(normal(32, 16) * np.float32(large), normal(16, 3) / np.float32(large), normal(32, 3), of_one_shape)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["input", "kernel", "gradient"])
def test_what_is_not_finite_stays_visible(bad, where):
    """A row or column that holds it is not finite; the others are, so that one bad sample can be told from the rest."""
    x, w, g = normal(32, 16), normal(16, 3), normal(32, 3)
    {"input": x, "kernel": w, "gradient": g}[where][1, 1] = bad
    result, to_x, to_w = (to_numpy(each) for each in of_one_shape(*tensors(x, w, g)))
    if where == "input":
        np.testing.assert_array_equal(np.isfinite(result).all(1), np.arange(32) != 1)
        np.testing.assert_array_equal(np.isfinite(to_w).all(1), np.arange(16) != 1)
        assert np.isfinite(to_x).all()
    elif where == "kernel":
        np.testing.assert_array_equal(np.isfinite(result).all(0), [True, False, True])
        np.testing.assert_array_equal(np.isfinite(to_x).all(0), np.arange(16) != 1)
        assert np.isfinite(to_w).all()
    else:
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(np.isfinite(to_x).all(1), np.arange(32) != 1)
        np.testing.assert_array_equal(np.isfinite(to_w).all(0), [True, False, True])


def test_zeros():
    result, to_x, to_w = check(np.zeros((32, 16)), normal(16, 3), normal(32, 3), of_one_shape)
    assert not result.any() and not to_w.any() and to_x.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_inputs(dtype):
    x, w, g = normal(16, 32), normal(32, 8), normal(16, 8)
    x, g = (to_numpy(tensors(each, dtype=dtype)[0]).astype("float32") for each in (x, g))
    results = compiled(with_gradients(matmul))(*tensors(x, dtype=dtype), *tensors(w), *tensors(g, dtype=dtype))
    assert [keras.backend.standardize_dtype(each.dtype) for each in results] == [dtype, dtype, "float32"]
    expected = Product("ab,bc->ac", x, w, g)
    half_step = {"bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype] * 2.0  # and float16's subnormals: nothing is there
    for actual, (exact, bound) in zip(results[:2], (expected.result, expected.input_gradient), strict=True):
        assert_close(actual, (exact, bound + np.abs(exact) * half_step + 2.0**-24))
    assert_close(results[2], expected.kernel_gradient)  # of a float32 kernel: not rounded to 16 bits


def test_float16_products_that_overflow_are_infinite():
    x, w = np.full((2, 64), 300.0), np.full((64, 2), 300.0)
    result = compiled(matmul)(*tensors(x, dtype="float16"), *tensors(w))
    assert np.isinf(to_numpy(result)).all()


@pytest.mark.skipif(BACKEND != "jax", reason="JAX shows what a backward pass holds")
def test_jax_holds_only_fp8_between_the_passes():
    import jax

    _, backward = jax.vjp(lambda x, w: matmul(x, w), *tensors(normal(8, 16), normal(16, 4)))
    large = [leaf.dtype.name for leaf in jax.tree.leaves(backward) if leaf.size > 1]
    assert large == ["float8_e4m3fn"] * 2


def lowered(function, *arguments):
    """The program as the backend hands it to XLA, with the operations' names."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function).lower(*arguments).compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    import tensorflow as tf

    function = tf.function(function, jit_compile=True, autograph=False)
    return function.experimental_get_compiler_ir(*arguments)(stage="stablehlo")


def test_the_program_has_three_fp8_products_each_with_its_name():
    def multiply(x, w):
        with keras.name_scope("outer"), keras.name_scope("inner"):
            return matmul(x, w, path="outer/inner")

    text = lowered(with_gradients(multiply), *tensors(normal(8, 16), normal(16, 4), normal(8, 4)))
    products = [line for line in text.splitlines() if "stablehlo.dot" in line]
    assert len(products) == 3 and all(line.count("f8E") == 2 for line in products)
    assert sum("f8E5M2" in line for line in products) == 2
    # Fast accumulation forward: the default precision. Precise backward.
    assert sum("HIGHEST" in line for line in products) == 2
    assert all("f8E5M2" in line for line in products if "HIGHEST" in line)
    for role in ("forward", "input_gradient", "kernel_gradient"):
        # JAX closes the parentheses of jvp(...) and transpose(...) behind the scopes that they are around.
        assert re.search(rf"outer\)*/inner\)*/keras_mp\.{role}\b", text)


def test_bad_input():
    x, w = tensors(normal(2, 3, 4), normal(4, 5))
    for name, arguments in (("inputs", (keras.ops.cast(x, "int32"), w)), ("kernel", (x, keras.ops.cast(w, "int8")))):
        with pytest.raises(TypeError, match=f"{name} must be floats, got int.*cast them"):
            matmul(*arguments)
    with pytest.raises(ValueError, match="scaling='none' is unknown"):
        matmul(x, w, "none")
    for equation, why in {
        "abc,cd": "not of the form 'input,kernel->result'",
        "abc,cd->abe": "the label 'd' in 1 of its 3 terms",
        "abc,acd->abd": "the label 'a' in 3 of its 3 terms",
        "aab,bc->ac": "the label 'a' twice in one term",
        "abc,...cd->abd": "an ellipsis in the kernel",
    }.items():
        with pytest.raises(ValueError, match=why.replace("(", "\\(")):
            matmul(x, w, equation=equation)
    with pytest.raises(ValueError, match="equation='ab,bc->ac' takes inputs of 2 axes, got 3"):
        matmul(x, w, equation="ab,bc->ac")
