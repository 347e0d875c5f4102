"""INT8 products: each integer and scale against NumPy, non-finite tensors, and what holds for FP8 conversion."""

import warnings

import keras
import numpy as np
import pytest
import zoo
from int8_reference import TOP, amax, divided, integers, scale_of, variable, words
from marks import ci_on, few
from reference import compiled, tensors, to_numpy, with_gradients

import keras_mp
from keras_mp.fp8 import DelayedScaling, Int8Scaling, convert, get_recipe, matmul, revert
from keras_mp.fp8.int8_scaling import MOST_TERMS
from keras_mp.fp8.layers import Float8Layer
from keras_mp.rebuild import layers_by_path
from models.gpt import gpt
from models.transformer import Size

pytestmark = ci_on("jax")

PATH = "block/dense"
EAGER_TOO = [pytest.param(False, marks=pytest.mark.ci), True]


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


def product(recipe, x, w, g, jit=True, dtype="float32", history=None, equation=""):
    """Result and gradients, in float64."""
    known = None if history is None else keras.ops.convert_to_tensor(history)
    run = with_gradients(lambda x, w: matmul(x, w, recipe, path=PATH, history=known, equation=equation))
    x, w, g = *tensors(x, dtype=dtype), *tensors(w), *tensors(g, dtype=dtype)
    return [to_numpy(each) for each in (compiled(run) if jit else run)(x, w, g)]


def quantized(x, step=None, seed=0, margin=0):
    """Integers and the scale; a gradient's with the words of a step."""
    scale = scale_of(amax(x), margin)
    bits = None if step is None else words(np.shape(x), seed, step, variable(PATH))
    return integers(x, scale, bits), scale


OPERANDS = {
    "normal": lambda: (normal(6, 16), normal(16, 8), normal(6, 8)),
    "one row": lambda: (normal(1, 16), normal(16, 8), normal(1, 8)),
    "one column": lambda: (normal(6, 16), normal(16, 1), normal(6, 1)),
    "one term": lambda: (normal(6, 1), normal(1, 8), normal(6, 8)),
    "zeros": lambda: (np.zeros((6, 16), "float32"), normal(16, 8), np.zeros((6, 8), "float32")),
    "huge": lambda: (normal(6, 16) * 1e37, normal(16, 8) * 1e-9, normal(6, 8) * 1e-3),
    "huge gradient": lambda: (normal(6, 16) * 1e-3, normal(16, 8) * 1e-9, normal(6, 8) * 1e37),
    "tiny": lambda: (normal(6, 16) * 1e-30, normal(16, 8) * 1e9, normal(6, 8)),
    "tiny gradient": lambda: (normal(6, 16), normal(16, 8) * 1e9, normal(6, 8) * 1e-30),
}


@pytest.mark.parametrize("jit", EAGER_TOO)
@pytest.mark.parametrize("name", few(OPERANDS, "normal"))
def test_every_integer_and_scale(name, jit):
    x, w, g = OPERANDS[name]()
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    for kernel_gradient in ("compute", "int8"):
        y, dx, dw = product(Int8Scaling(kernel_gradient=kernel_gradient), x, w, g, jit)
        np.testing.assert_array_equal(y, divided(x8 @ w8, sx, sw))
        np.testing.assert_array_equal(dx, divided(g8 @ w8.T, sg, sw))
        if kernel_gradient == "int8":
            np.testing.assert_array_equal(dw, divided(x8.T @ g8, sx, sg))
        else:
            exact, terms = x.T.astype("float64") @ g, np.abs(x.T.astype("float64")) @ np.abs(g)
            assert np.all(np.abs(dw - exact) <= len(x) * 2.0**-23 * terms)


def test_the_integers_themselves():
    """Of each role, with a step and a seed, through `quantize`; the top is 127 on both sides."""
    x = np.concatenate([normal(7, 9), [[1e3, -1e3, 0.5, -0.5, 2.5, 0.0, -0.0, 1.5, -1.5]]]).astype("float32")
    recipe = Int8Scaling(seed=2**40 + 3, margin=1)
    steps = 2**24 - 2
    history = np.array([0.0] * 15 + [200.0, steps], "float32")  # the last entry is the number of steps
    for role in ("input", "kernel", "gradient"):
        quantize = compiled(lambda x, history, role=role: recipe.quantize(x, role, None, history, variable(PATH)))
        values, scale = quantize(*tensors(x, history))
        expected_scale = scale_of(200.0, 1)
        bits = words(x.shape, recipe.seed, steps, variable(PATH)) if role == "gradient" else None
        np.testing.assert_array_equal(to_numpy(values), integers(x, expected_scale, bits))
        assert keras.backend.standardize_dtype(values.dtype) == "int8"
        assert float(scale) == expected_scale
        assert to_numpy(values).max() == TOP and to_numpy(values).min() == -TOP


@pytest.mark.ci
def test_bfloat16_tensors_and_a_kernel_in_float32():
    x, w, g = (to_numpy(keras.ops.cast(each, "bfloat16")).astype("float32") for each in OPERANDS["normal"]())
    w = w + 2.0**-12
    y, dx, dw = product(Int8Scaling(kernel_gradient="int8"), x, w, g, dtype="bfloat16")
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    for actual, exact in ((y, divided(x8 @ w8, sx, sw)), (dx, divided(g8 @ w8.T, sg, sw))):
        np.testing.assert_array_equal(actual, to_numpy(keras.ops.cast(exact, "bfloat16")))
    np.testing.assert_array_equal(dw, divided(x8.T @ g8, sx, sg))  # not rounded to 16 bits


@pytest.mark.ci
@pytest.mark.parametrize("kernel_gradient", ["compute", "int8"])
def test_scales_by_row_and_column(kernel_gradient):
    x, w, g = normal(6, 16), normal(16, 8), normal(6, 8)
    x[2], x[4] = 0, 1e6 * x[4]
    y, dx, dw = product(Int8Scaling("current", kernel_gradient=kernel_gradient), x, w, g)

    def operand(x, axis, gradient=False):
        scale = scale_of(amax(x, axis))
        return integers(x, scale, words(x.shape, 0, 0, variable(PATH)) if gradient else None), scale

    def scaled(left, right):
        rows, columns = np.float32(1) / left[1], np.float32(1) / right[1]
        return ((left[0] @ right[0]).astype("float32") * rows) * columns

    np.testing.assert_array_equal(y, scaled(operand(x, 1), operand(w, 0)))
    by_row = operand(w, 1)
    np.testing.assert_array_equal(dx, scaled(operand(g, 1, True), (by_row[0].T, by_row[1].T)))
    if kernel_gradient == "int8":
        by_column = operand(x, 0)
        np.testing.assert_array_equal(dw, scaled((by_column[0].T, by_column[1].T), operand(g, 0, True)))
    else:
        np.testing.assert_allclose(dw, x.T.astype("float64") @ g, rtol=0, atol=1e-6 * np.max(np.abs(x)) * 6 * 4)


@pytest.mark.ci
def test_an_einsum_that_splits_features_into_heads():
    x, w, g = normal(2, 3, 8), normal(8, 2, 4), normal(2, 3, 2, 4)
    y, dx, dw = product(Int8Scaling(kernel_gradient="int8"), x, w, g, equation="abc,cde->abde")
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    np.testing.assert_array_equal(y, divided(np.einsum("abc,cde->abde", x8, w8), sx, sw))
    np.testing.assert_array_equal(dx, divided(np.einsum("abde,cde->abc", g8, w8), sg, sw))
    np.testing.assert_array_equal(dw, divided(np.einsum("abc,abde->cde", x8, g8), sx, sg))


BAD = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("jit", EAGER_TOO)
@pytest.mark.parametrize("bad", few(BAD, np.nan))
@pytest.mark.parametrize("scales", few(["delayed", "static", "current"], "delayed"))
def test_what_is_not_finite_is_never_a_silent_integer(scales, bad, jit):
    recipe = Int8Scaling(scales, kernel_gradient="int8")
    # As after many steps: the scales are known, and need not look at the tensors.
    history = np.ones((3, recipe.history_length + 1), "float32") * 100
    for spoiled in range(3):
        operands = [normal(6, 16), normal(16, 8), normal(6, 8)]
        operands[spoiled][3, 5] = bad
        y, dx, dw = product(recipe, *operands, jit, history=history)
        results = {0: (y, dw), 1: (y, dx), 2: (dx, dw)}[spoiled]
        for result in results:
            if scales == "current":
                wrong = ~np.isfinite(result)
                assert wrong.any() and not wrong.all()  # its row or column
            else:
                assert not np.isfinite(result).any()


def test_gradients_are_rounded_without_bias_and_anew_in_each_step():
    recipe = Int8Scaling()
    g = np.full((1, 4096), 10.25, "float32")
    g[0, 0] = 127.0
    quantize = compiled(lambda g, history: recipe.quantize(g, "gradient", None, history, 1).values)
    values = []
    for step in range(16):
        history = np.array([127.0] * 16 + [step], "float32")
        values.append(to_numpy(quantize(*tensors(g, history)))[0])
    values = np.array(values)
    assert np.all(values[:, 0] == 127) and set(np.unique(values[:, 1:])) == {10, 11}
    # Four standard deviations of the mean of 65,520 words.
    assert abs(values[:, 1:].mean() - 10.25) < 4 * np.sqrt(0.25 * 0.75 / values[:, 1:].size)
    assert all(np.any(values[0] != row) for row in values[1:])


@pytest.mark.ci
def test_a_product_of_too_many_terms_is_not_wrapped():
    terms = MOST_TERMS + 1
    x, w, g = np.ones((1, terms), "float32"), np.full((terms, 1), 1.0, "float32"), np.ones((1, 1), "float32")
    y, dx, dw = product(Int8Scaling(kernel_gradient="int8"), x, w, g)
    np.testing.assert_allclose(y, terms, rtol=1e-6)
    x, g = np.ones((terms, 1), "float32"), np.ones((terms, 1), "float32")
    _, _, dw = product(Int8Scaling(kernel_gradient="int8"), x, np.ones((1, 1), "float32"), g)
    np.testing.assert_allclose(dw, terms, rtol=1e-6)
    assert MOST_TERMS * TOP**2 < 2**31 <= (MOST_TERMS + 1) * TOP**2


@pytest.mark.ci
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX knows every size when it traces")
def test_a_batch_of_unknown_size_with_too_many_rows_is_nan():
    import tensorflow as tf

    recipe = Int8Scaling(kernel_gradient="int8")

    @tf.function(input_signature=[tf.TensorSpec((None, 1))], jit_compile=True)
    def kernel_gradient(x):
        w = tf.ones((1, 1))
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = matmul(x, w, recipe)
        return tape.gradient(y, w)

    np.testing.assert_allclose(kernel_gradient(tf.ones((8, 1))), 8.0)
    assert np.isnan(kernel_gradient(tf.ones((MOST_TERMS + 1, 1)))).all()


def everything(path, layer):
    return True


def integer_layers(model):
    return [
        layer
        for layer in layers_by_path(model).values()
        if isinstance(layer, Float8Layer) and isinstance(layer.recipe, Int8Scaling)
    ]


def outputs(model, batch):
    return [to_numpy(each) for each in keras.tree.flatten(model(batch, training=False))]


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.usefixtures("mixed_bfloat16")
@pytest.mark.parametrize("name", few(zoo.names(), "nested_and_shared"))
def test_every_kind_of_model(name):
    model, batch = zoo.build(name, "mixed_bfloat16")
    before = outputs(model, batch)
    int8 = convert(model, Int8Scaling(), select=everything)
    assert len(integer_layers(int8)) == len(_products(model)) > 0
    for actual, expected in zip(outputs(int8, batch), before, strict=True):
        # Rounding errors are relative to the terms of a sum, of order 1 here: see test_convert.
        size = max(np.linalg.norm(expected), 0.25 * np.sqrt(expected.size))
        assert 0 < np.linalg.norm(actual - expected) <= 0.05 * size
    back = revert(int8)
    assert not integer_layers(back)
    assert_equal(outputs(back, batch), before)


@pytest.mark.ci
@pytest.mark.usefixtures("mixed_bfloat16")
@pytest.mark.parametrize(
    "name, scales", [("functional", "static"), ("attention", "delayed"), ("subclass_inside_functional", "current")]
)
def test_trained_saved_and_loaded_like_any_model(name, scales, tmp_path):
    model, batch = zoo.build(name, "mixed_bfloat16")
    int8 = convert(model, Int8Scaling(scales), select=everything)
    target = np.zeros_like(outputs(int8, batch)[0])
    int8.compile("adam", "mse")
    start = int8.evaluate(batch, target, verbose=0)
    int8.fit(batch, target, epochs=20, verbose=0)
    assert int8.evaluate(batch, target, verbose=0) < start
    int8.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"Subclassed": zoo.Subclassed})
    assert_equal(outputs(loaded, batch), outputs(int8, batch))
    assert {layer.recipe for layer in integer_layers(loaded)} == {Int8Scaling(scales)}
    for old, new in zip(integer_layers(int8), integer_layers(loaded), strict=True):
        before, after = saved(old.amax_history), saved(new.amax_history)
        assert before.keys() == after.keys() and np.all(after["1"] == 20)
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key])
    loaded.fit(batch, target, verbose=0)
    assert all(np.all(saved(layer.amax_history)["1"] == 21) for layer in integer_layers(loaded))


def saved(history):
    store = {}
    history.save_own_variables(store)
    return {key: to_numpy(value) for key, value in store.items()}


@pytest.mark.ci
@pytest.mark.usefixtures("mixed_bfloat16")
def test_a_reload_in_the_middle_goes_on_as_if_there_was_none(tmp_path):
    dense = [keras.layers.Dense(16, name=f"dense{index}") for index in range(3)]
    plain = keras.Sequential([keras.Input((16,)), *dense], name="mlp")
    model = convert(plain, Int8Scaling(kernel_gradient="int8"), select=everything)
    model.compile("adam", "mse")
    x, y = normal(32, 16), normal(32, 16)
    model.fit(x[:16], y[:16], batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(x[16:], y[16:], batch_size=4, shuffle=False, verbose=0)
    whole, resumed = ([to_numpy(layer.kernel) for layer in integer_layers(each)] for each in (model, loaded))
    assert_equal(whole, resumed)


@pytest.mark.ci
@pytest.mark.usefixtures("mixed_bfloat16")
def test_amaxes_stay_where_the_recipe_changes():
    model, batch = zoo.build("functional", "mixed_bfloat16")
    model = convert(model, DelayedScaling(amax_history_length=4), select=everything)
    model.compile("sgd", "mse")
    model.fit(batch, np.zeros_like(outputs(model, batch)[0]), epochs=5, verbose=0)
    with pytest.warns(UserWarning, match="change from DelayedScaling.* to Int8Scaling"):
        int8 = convert(model, Int8Scaling(amax_history_length=4), select=everything)
    for old, new in zip(_products(model), _products(int8), strict=True):
        np.testing.assert_array_equal(saved(old.amax_history)["0"], saved(new.amax_history)["0"])
        assert np.all(saved(new.amax_history)["1"] == 0)


def _products(model):
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv2D)
    return [layer for layer in layers_by_path(model).values() if isinstance(layer, kinds)]


@pytest.mark.ci
@pytest.mark.usefixtures("mixed_bfloat16")
def test_exported_as_plain_float32_layers(tmp_path):
    pytest.importorskip("tensorflow", reason="a SavedModel needs TensorFlow")
    model, batch = zoo.build("attention", "mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stabilize")
        int8 = keras_mp.stabilize(convert(model, Int8Scaling(), select=everything))
    report = keras_mp.export_float32(int8, tmp_path / "saved", verify=batch)
    assert report.low_precision_ops == 0 and report.max_difference <= 1e-5


@pytest.mark.ci
def test_a_gpt_of_the_size_of_a_training_recipe_trains():
    """XLA for CPUs in TensorFlow refused its kernel gradients, bfloat16 with float32 sums."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = gpt(Size(1, 128, 2), 256, 128)
    fp8 = {"recipe": "int8", "select": everything}
    model = keras_mp.prepare(model, keras.optimizers.AdamW(1e-3), keras_mp.ChunkedCrossEntropy(), fp8=fp8, verbose=0)
    tokens = np.random.default_rng().integers(0, 256, size=(16, 128))
    losses = [float(model.train_on_batch(tokens, tokens)) for _ in range(8)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.once
def test_the_recipe_is_a_value():
    recipe = Int8Scaling("static", kernel_gradient="int8", calibration_steps=4, seed=3)
    assert str(recipe) == "Int8Scaling(scales='static', kernel_gradient='int8', calibration_steps=4, seed=3)"
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert again == recipe and hash(again) == hash(recipe) and again.history_length == 2
    assert get_recipe(recipe) is recipe and str(Int8Scaling()) == "Int8Scaling()"


@pytest.mark.once
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scales": "rowwise"}, "scales='rowwise' is unknown: use 'delayed' or 'static' or 'current'"),
        ({"kernel_gradient": "bfloat16"}, "kernel_gradient='bfloat16' is unknown: use 'compute' or 'int8'"),
        ({"amax_compute": "mean"}, "amax_compute='mean' is unknown"),
        ({"calibration_steps": 0}, "calibration_steps=0 must be a whole number, 1 or more"),
        ({"margin": -1}, "margin=-1 must be a whole number"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number, 0 or more"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Int8Scaling(**arguments)


@pytest.mark.once
def test_a_history_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"history has the shape \(3, 16\), and Int8Scaling.* needs \(3, 17\)"):
        matmul(*tensors(np.ones((2, 2)), np.ones((2, 2))), Int8Scaling(), history=np.zeros((3, 16), "float32"))
