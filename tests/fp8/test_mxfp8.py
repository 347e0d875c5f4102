"""MXFP8 products against NumPy, and what holds for FP8 conversion."""

import functools
import warnings

import keras
import numpy as np
import pytest
import zoo
from marks import few, slow_on
from mx_reference import mx_product
from reference import assert_close, check_products, compiled, sqnr, tensors, to_numpy, with_gradients

import keras_mp
from keras_mp.chips import CHIPS
from keras_mp.fp8 import DelayedScaling, MXFP8Scaling, convert, explain, get_recipe, is_available, matmul, revert
from keras_mp.fp8.layers import Float8Layer
from keras_mp.precision.hardware import Device, support
from keras_mp.rebuild import layers_by_path

EAGER = pytest.param(lambda function: function, marks=slow_on("jax"), id="eager")
MODES = pytest.mark.parametrize("mode", [EAGER, pytest.param(compiled, id="jit")])
RECIPES = {
    "E4M3": (MXFP8Scaling(), ("E4M3",) * 3),
    "hybrid": (MXFP8Scaling("hybrid", scale_rounding="floor"), ("E4M3", "E4M3", "E5M2")),
}


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


def check(equation, x, w, recipe, mode, scale=1.0):
    recipe, names = RECIPES[recipe]
    reference = functools.partial(mx_product, rounding=recipe.scale_rounding)
    multiply = functools.partial(matmul, recipe=recipe, equation=equation)
    check_products(multiply, reference, equation, (x, w), names, mode, 9, scale)


@MODES
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "case",
    few(
        [
            ("ab,bc->ac", (24, 40), (40, 17)),
            ("abc,cde->adbe", (3, 25, 16), (16, 2, 4)),
            ("abc,cd->abd", (3, 5, 64), (64, 8)),
            ("abcd,cde->abe", (3, 5, 2, 20), (2, 20, 16)),
            ("abcd,dce->abe", (3, 5, 2, 20), (20, 2, 16)),
            ("a,ab->b", (16,), (16, 8)),
        ]
    ),
)
def test_any_product(case, recipe, mode):
    check(*case, recipe, mode)


@MODES
@pytest.mark.parametrize("x, w", [((1, 16), (16, 4)), ((5, 1), (1, 4)), ((5, 16), (16, 1)), ((1, 1), (1, 1))])
def test_one_row_and_one_column(x, w, mode):
    check("ab,bc->ac", x, w, "E4M3", mode)


def test_tiny_gradients():
    check("ab,bc->ac", (16, 32), (32, 16), "hybrid", compiled, scale=1e-20)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX knows every size when it traces")
@pytest.mark.parametrize("jit", [False, True])
def test_unknown_sizes_and_empty_batches(jit):
    import tensorflow as tf

    w, names = normal(40, 8), ("E4M3", "E4M3")
    spec = tf.TensorSpec((None, None, 40)), tf.TensorSpec((40, 8)), tf.TensorSpec((None, None, 8))
    function = tf.function(with_gradients(lambda x, w: matmul(x, w, "mxfp8")), input_signature=spec, jit_compile=jit)
    for rows, columns in ((3, 5), (1, 1), (0, 5), (2, 32)):
        x, g = normal(rows, columns, 40), normal(rows, columns, 8)
        y, dx, dw = function(x, w, g)
        assert_close(y, mx_product("abc,cd->abd", x, w, names))
        assert_close(dx, mx_product("abd,cd->abc", g, w, names))
        assert_close(dw, mx_product("abc,abd->cd", x, g, names))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="test_unknown_sizes_and_empty_batches has these")
def test_an_empty_batch():
    run = compiled(with_gradients(lambda x, w: matmul(x, w, "mxfp8")))
    y, dx, dw = run(*tensors(normal(0, 40), normal(40, 8), normal(0, 8)))
    assert y.shape == (0, 8) and dx.shape == (0, 40) and not to_numpy(dw).any()


@MODES
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_zeros_and_what_is_not_finite(bad, mode):
    """Of a gradient with an overflow, both gradients have one, so that its step is skipped."""
    x, w, g = normal(40, 64), normal(64, 8), normal(40, 8)
    x[0], g[35, 3] = 0, bad
    y, dx, dw = map(to_numpy, mode(with_gradients(lambda x, w: matmul(x, w, "mxfp8")))(*tensors(x, w, g)))
    assert np.all(y[0] == 0) and np.isfinite(y).all()
    assert np.isnan(dx[35]).all() and np.isfinite(np.delete(dx, 35, 0)).all()
    assert np.isnan(dw[:, 3]).all() and np.isfinite(np.delete(dw, 3, 1)).all()


def test_an_outlier_costs_its_own_block_only():
    x, w = normal(64, 64), normal(64, 64)
    x[7, 40] *= 1e5
    exact = x.astype("float64") @ w
    values, scale = MXFP8Scaling().quantize(*tensors(x), "input")
    error = to_numpy(values) / to_numpy(scale) - x
    inside = np.zeros((64, 64), bool)
    inside[7, 32:] = True
    assert sqnr((x + error)[~inside], x[~inside]) > 30
    assert sqnr(to_numpy(matmul(*tensors(x, w), "mxfp8"))[np.arange(64) != 7], exact[np.arange(64) != 7]) > 27


@pytest.mark.parametrize("axes", [None, (0,), (0, 1)])
def test_quantize_as_other_recipes_do(axes):
    x = normal(5, 7, 40)
    values, scale = MXFP8Scaling().quantize(*tensors(x), "gradient", axes)
    np.testing.assert_allclose(to_numpy(values) / to_numpy(scale), x, atol=np.abs(x).max() / 16, rtol=0)
    mantissa, _ = np.frexp(to_numpy(scale))
    assert scale.shape == x.shape and np.all(mantissa == 0.5)
    with pytest.raises(ValueError, match="role='output' is not one of"):
        MXFP8Scaling().quantize(*tensors(x), "output")


def block_scaled_layers(model):
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    dense = [layer for layer in layers_by_path(model).values() if isinstance(layer, kinds)]
    return [layer for layer in dense if isinstance(layer, Float8Layer)], dense


def outputs(model, batch):
    return [to_numpy(each) for each in keras.tree.flatten(model(batch, training=False))]


def disturbed(model, batch, before):
    """How far outputs move where each kernel moves by up to 2^-4, what rounding to E4M3 may do: the most of 8 times."""
    rng, weights, distances = np.random.default_rng(), model.get_weights(), []
    for _ in range(8):
        model.set_weights([w * (1 + rng.uniform(-(2**-4), 2**-4, w.shape)) if w.ndim > 1 else w for w in weights])
        distances.append([np.linalg.norm(a - b) for a, b in zip(outputs(model, batch), before, strict=True)])
    model.set_weights(weights)
    return np.max(distances, axis=0)


@pytest.mark.parametrize("name", few(zoo.names(), "nested_and_shared"))
def test_every_kind_of_model(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, batch = zoo.build(name, "mixed_bfloat16")
    before = outputs(model, batch)
    converted = convert(model, "mxfp8", select=lambda path, layer: True)
    layers, dense = block_scaled_layers(converted)
    assert len(layers) == len(dense) > 0
    for actual, expected, moved in zip(outputs(converted, batch), before, disturbed(model, batch, before), strict=True):
        assert 0 < np.linalg.norm(actual - expected) <= 3 * moved
    for actual, expected in zip(outputs(revert(converted), batch), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("policy", few(["mixed_bfloat16", "mixed_float16", "float32"], "mixed_bfloat16"))
def test_trained_saved_and_loaded_like_any_model(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4, 40))
    x = keras_mp.fp8.Float8EinsumDense("abc,cde->abde", (None, 2, 16), recipe="mxfp8", name="split")(inputs)
    x = keras_mp.fp8.Float8Dense(16, "relu", recipe=RECIPES["hybrid"][0])(keras.ops.reshape(x, (-1, 4, 32)))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    data = normal(16, 4, 40), normal(16, 4, 16)
    losses = model.fit(*data, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.get_layer("split").recipe == MXFP8Scaling()
    np.testing.assert_array_equal(to_numpy(again(data[0])), to_numpy(model(data[0])))


@pytest.mark.ci
def test_exported_as_plain_float32_layers(tmp_path):
    pytest.importorskip("tensorflow", reason="a SavedModel needs TensorFlow")
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, batch = zoo.build("attention", "mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stabilize")
        model = keras_mp.stabilize(convert(model, "mxfp8", select=lambda path, layer: True))
    report = keras_mp.export_float32(model, tmp_path / "saved", verify=batch)
    assert report.low_precision_ops == 0 and report.max_difference <= 1e-5


def test_from_delayed_scaling_and_back():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, name="dense")])
    delayed = convert(model, DelayedScaling(), select=lambda path, layer: True)
    with pytest.warns(UserWarning, match="change from DelayedScaling.* to MXFP8Scaling"):
        blocks = convert(delayed, "mxfp8", select=lambda path, layer: True)
    assert blocks.get_layer("dense").amax_history is None


@pytest.mark.once
def test_the_recipe_is_a_value():
    recipe = MXFP8Scaling("hybrid", scale_rounding="floor")
    assert str(recipe) == "MXFP8Scaling(format='hybrid', scale_rounding='floor')"
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert again == recipe and hash(again) == hash(recipe) and not recipe.takes_parts
    assert get_recipe("mxfp8") == MXFP8Scaling() and str(MXFP8Scaling()) == "MXFP8Scaling()"
    with pytest.raises(ValueError, match="scale_rounding='down' is unknown: use 'up' or 'floor'"):
        MXFP8Scaling(scale_rounding="down")


def test_where_it_is_available():
    def ok(name, architecture):
        return support("mxfp8", Device("gpu", name, architecture, CHIPS.get(name)))

    assert not ok("h100", "9.0").ok and "10.0 is the first" in ok("h100", "9.0").reason
    assert ok("b200", "10.0").ok == ok("rtx5090", "12.0").ok == (keras.backend.backend() == "jax")
    assert not support("mxfp8", Device("tpu", "v7x", "v7x", CHIPS["v7x"])).ok
    assert not is_available("mxfp8").ok  # the tests run on CPUs
    with pytest.raises(ValueError, match="dtype='float16' must be 'fp8' or 'mxfp8'"):
        is_available("float16")


def test_on_an_older_gpu_convert_warns(monkeypatch):
    old = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0", CHIPS["h100"])
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [old])
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, dtype="mixed_bfloat16")], name="small")
    with pytest.warns(UserWarning, match="does not multiply MXFP8 operands.* use 'delayed'"):
        convert(model, "mxfp8", select=lambda path, layer: True)


def test_layers_are_chosen_for_chips_that_multiply_blocks():
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((512, 2048))
    for name, size in [("first", 2048), ("up", 8192), ("down", 2048), ("narrow", 64), ("last", 2048)]:
        x = keras.layers.Dense(size, name=name)(x)
    model = keras.Model(inputs, x)
    with pytest.raises(ValueError, match="target='h100': H100 SXM5 has no MXFP8 units.*With: .*b200"):
        convert(model, "mxfp8", target="h100")
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match="KERAS_BACKEND to 'jax'"):
            convert(model, "mxfp8", target="b200")
        return
    rows = {row.path: row for row in explain(model, target="b200", recipe="mxfp8")}
    assert rows["up"].float8 and not rows["narrow"].float8
    chip, (m, k, n) = CHIPS["b200"], (8 * 512, 2048, 8192)
    rate, bandwidth = (each / chip.devices for each in (chip.peak["fp8"], chip.bandwidth))
    x, w, g = m * k, k * n, m * n
    products = [max(2 * m * k * n / rate, moved / bandwidth) for moved in (x + w + 2 * g, g + w + 2 * x, x + g + 4 * w)]
    # Each number is read for two amaxes and for the copies, and written twice.
    quantization = (x + g) * (3 * 2 + 2) + w * (3 * 4 + 2)
    np.testing.assert_allclose(rows["up"].cost.fp8, sum(products) + quantization / bandwidth)
