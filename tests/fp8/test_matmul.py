"""The three products against NumPy, and what breaks them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from marks import ci_on
from reference import Product, assert_close, compiled, product, quantize, sqnr, tensors, to_numpy, with_gradients

from keras_mp.fp8 import E4M3, CurrentScaling, matmul
from keras_mp.fp8.contraction import last_axis

pytestmark = ci_on("jax")

BACKEND = keras.backend.backend()
EAGER = pytest.param(lambda function: function, id="eager")
JIT = pytest.param(compiled, id="jit")
# Out of jit JAX compiles each operation for itself, at a tenth of a second each.
MODES = pytest.mark.parametrize("mode", [EAGER, JIT] if BACKEND == "tensorflow" else [JIT])
E4M3_EVERYWHERE = CurrentScaling(E4M3, power_of_two=True)


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


def check(equation, x, w, g, mode=compiled, recipe=None, formats=("E4M3", "E4M3", "E5M2"), power_of_two=False):
    def multiply(x, w):
        return matmul(x, w, recipe, equation=equation)

    result, to_x, to_w = mode(with_gradients(multiply))(*tensors(x, w, g))
    expected = Product(equation or last_axis(np.ndim(x)), x, w, g, formats, power_of_two)
    assert_close(result, expected.result)
    assert_close(to_x, expected.input_gradient)
    assert_close(to_w, expected.kernel_gradient)
    return result, to_x, to_w


@pytest.mark.parametrize("mode", [EAGER, JIT])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_any_rank(rank, mode):
    shape = (3, 2, 5)[: rank - 1]
    check("", normal(*shape, 24), normal(24, 7), normal(*shape, 7), mode)


@MODES
@pytest.mark.parametrize(
    "equation, x, w, y",
    [
        ("abc,cd->abd", (2, 3, 8), (8, 5), (2, 3, 5)),
        ("abc,cde->abde", (2, 3, 8), (8, 2, 4), (2, 3, 2, 4)),
        ("abcd,cde->abe", (2, 3, 2, 4), (2, 4, 8), (2, 3, 8)),
        ("btd,ndh->btnh", (2, 3, 8), (2, 8, 4), (2, 3, 2, 4)),
        ("abc,cd->dba", (2, 3, 8), (8, 5), (5, 3, 2)),
        ("abcd,dcef->afbe", (2, 3, 4, 5), (5, 4, 6, 7), (2, 7, 3, 6)),
    ],
)
@pytest.mark.parametrize("recipe", [None, E4M3_EVERYWHERE], ids=["hybrid", "E4M3"])
def test_any_product(equation, x, w, y, recipe, mode):
    settings = {"formats": ("E4M3",) * 3, "power_of_two": True} if recipe else {}
    check(equation, normal(*x), normal(*w), normal(*y), mode, recipe, **settings)


def test_an_ellipsis_stands_for_any_axes():
    x, w = normal(2, 3, 4, 8), normal(8, 5)
    result = matmul(*tensors(x, w), equation="...x, xy->...y")
    assert_close(result, product("abcx,xy->abcy", quantize(x, "E4M3"), quantize(w, "E4M3")))


@MODES
@pytest.mark.parametrize("x, w", [((1, 16), (16, 4)), ((5, 1), (1, 4)), ((5, 16), (16, 1)), ((1, 1), (1, 1))])
def test_one_row_and_one_column(x, w, mode):
    check("", normal(*x), normal(*w), normal(x[0], w[1]), mode)


@MODES
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_an_empty_batch(shape, mode):
    result, to_x, to_w = mode(with_gradients(matmul))(
        *tensors(np.zeros(shape), normal(16, 4), np.zeros((*shape[:-1], 4)))
    )
    assert result.shape == (*shape[:-1], 4) and to_x.shape == shape
    np.testing.assert_array_equal(to_numpy(to_w), np.zeros((16, 4)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX knows every size when it compiles")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("unknown", [(None, 16), (None, None, 16)])
def test_an_unknown_batch_size(unknown, jit):
    import tensorflow as tf

    w = normal(16, 4)
    features = unknown[:-1] + (4,)
    signature = [tf.TensorSpec(unknown), tf.TensorSpec((16, 4)), tf.TensorSpec(features)]
    function = tf.function(with_gradients(matmul), signature, jit_compile=jit, autograph=False)
    for sizes in ((1, 1), (7, 2), (0, 3), (4, 5)):
        shape = sizes[: len(unknown) - 1]
        x, g = normal(*shape, 16), normal(*shape, 4)
        result, to_x, to_w = function(*tensors(x, w, g))
        expected = Product(last_axis(len(unknown)), x, w, g)
        for actual, each in (
            (result, expected.result),
            (to_x, expected.input_gradient),
            (to_w, expected.kernel_gradient),
        ):
            assert_close(actual, each)


@pytest.mark.parametrize("x, w, y", [((64, 64), (64, 64), (64, 64)), ((200, 300), (300, 100), (200, 100))])
def test_signal_to_noise(x, w, y):
    x, w, g = normal(*x), normal(*w), normal(*y)
    result, to_x, to_w = compiled(with_gradients(matmul))(*tensors(x, w, g))
    x, w, g = (each.astype("float64") for each in (x, w, g))
    assert sqnr(result, x @ w) >= 28
    assert sqnr(to_x, g @ w.T) >= 24
    assert sqnr(to_w, x.T @ g) >= 24


def test_signal_to_noise_of_the_cast():
    x = normal(256, 256)
    values, scale = CurrentScaling().quantize(*tensors(x), "input")
    assert sqnr(to_numpy(values) / float(scale), x) >= 31


@MODES
@pytest.mark.parametrize("scale", [1e-6, 1e-12, 1e-20, 1e-30])
def test_tiny_gradients_are_not_lost(scale, mode):
    """A loss of 1e-6 gives gradients far below what FP8 can hold; the scale brings them back."""
    x, w, g = normal(32, 16), normal(16, 8), normal(32, 8) * np.float32(scale)
    _, _, to_w = check("", x, w, g, mode)
    assert sqnr(to_w, x.astype("float64").T @ g.astype("float64")) >= 22


@MODES
@pytest.mark.parametrize("large", [1e10, 1e30])
def test_huge_values_of_one_operand(large, mode):
    check("", normal(8, 16) * np.float32(large), normal(16, 4) / np.float32(large), normal(8, 4), mode)


@MODES
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["input", "kernel", "gradient"])
def test_what_is_not_finite_stays_visible(bad, where, mode):
    """A row or column that holds it is not finite; the others are, so that one bad sample can be told from the rest."""
    x, w, g = normal(4, 16), normal(16, 3), normal(4, 3)
    {"input": x, "kernel": w, "gradient": g}[where][1, 1] = bad
    result, to_x, to_w = (to_numpy(each) for each in mode(with_gradients(matmul))(*tensors(x, w, g)))
    if where == "input":
        np.testing.assert_array_equal(np.isfinite(result).all(1), [True, False, True, True])
        np.testing.assert_array_equal(np.isfinite(to_w).all(1), np.arange(16) != 1)
        assert np.isfinite(to_x).all()
    elif where == "kernel":
        np.testing.assert_array_equal(np.isfinite(result).all(0), [True, False, True])
        np.testing.assert_array_equal(np.isfinite(to_x).all(0), np.arange(16) != 1)
        assert np.isfinite(to_w).all()
    else:
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(np.isfinite(to_x).all(1), [True, False, True, True])
        np.testing.assert_array_equal(np.isfinite(to_w).all(0), [True, False, True])


@MODES
def test_zeros(mode):
    x, w, g = np.zeros((4, 8)), normal(8, 3), normal(4, 3)
    result, to_x, to_w = check("", x, w, g, mode)
    assert not to_numpy(result).any() and not to_numpy(to_w).any() and to_numpy(to_x).any()


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
    result = matmul(*tensors(x, dtype="float16"), *tensors(w))
    assert np.isinf(to_numpy(result)).all()


def test_only_fp8_is_kept_for_the_backward_pass(monkeypatch):
    gradients = []
    original = keras.ops.custom_gradient

    def spy(function):
        def wrapped(*arguments):
            result, gradient = function(*arguments)
            gradients.append(gradient)
            return result, gradient

        return original(wrapped)

    monkeypatch.setattr(keras.ops, "custom_gradient", spy)
    with_gradients(matmul)(*tensors(normal(8, 16), normal(16, 4), normal(8, 4)))
    kept = []

    def visit(thing, seen):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if hasattr(thing, "dtype") and hasattr(thing, "shape"):
            kept.append((keras.backend.standardize_dtype(thing.dtype), tuple(thing.shape)))
        elif isinstance(thing, tuple):
            for each in thing:
                visit(each, seen)
        for cell in getattr(thing, "__closure__", None) or ():
            visit(cell.cell_contents, seen)

    visit(gradients[0], set())
    assert sorted(kept) == [
        ("float32", ()),
        ("float32", ()),
        ("float8_e4m3fn", (8, 16)),
        ("float8_e4m3fn", (16, 4)),
    ]


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
    with pytest.raises(ValueError, match="recipe='none' is unknown"):
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


OTHER = """
import json, sys
import numpy as np
from reference import tensors, to_numpy, with_gradients, compiled
from keras_mp.fp8 import CurrentScaling, matmul

x, w, g = np.load(sys.argv[1]).values()
x, w, g = tensors(x, w, g)
found = {"bits": {}, "scales": {}}
for role, tensor in (("input", x), ("kernel", w), ("gradient", g)):
    values, scale = compiled(lambda t, role=role: CurrentScaling().quantize(t, role))(tensor)
    found["bits"][role] = np.asarray(values).view(np.uint8).tolist()
    found["scales"][role] = float(scale)
found["results"] = [to_numpy(each).tolist() for each in compiled(with_gradients(matmul))(x, w, g)]
print(json.dumps(found))
"""


@pytest.mark.ci
def test_the_two_backends_agree(tmp_path):
    pytest.importorskip("tensorflow", reason="both backends are compared")
    pytest.importorskip("jax", reason="both backends are compared")
    arrays = normal(33, 65) * np.exp(normal(33, 65)), normal(65, 17), normal(33, 17) * np.float32(1e-6)
    np.savez(tmp_path / "arrays.npz", *arrays)
    here = Path(__file__).parent
    found = {}
    for backend in ("tensorflow", "jax"):
        environment = os.environ | {
            "KERAS_BACKEND": backend,
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
        }
        done = subprocess.run(
            [sys.executable, "-c", OTHER, str(tmp_path / "arrays.npz")], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found[backend] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = found["tensorflow"], found["jax"]
    assert ours["bits"] == theirs["bits"] and ours["scales"] == theirs["scales"]
    expected = Product("ab,bc->ac", *arrays)
    bounds = expected.result[1], expected.input_gradient[1], expected.kernel_gradient[1]
    for a, b, bound in zip(ours["results"], theirs["results"], bounds, strict=True):
        assert np.all(np.abs(np.subtract(a, b)) <= 2 * bound)
