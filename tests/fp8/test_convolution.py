"""INT8 convolutions: each integer against NumPy, and what holds for other converted layers."""

import warnings

import convolution_reference as convolved
import keras
import numpy as np
import pytest
from int8_reference import amax, divided, integers, scale_of, variable, words
from marks import few
from reference import compiled, tensors, to_numpy, with_gradients

import keras_mp
from keras_mp.fp8 import CurrentScaling, Int8Scaling, convert, explain, revert
from keras_mp.fp8.convolution import convolution
from keras_mp.fp8.convolution_layer import Int8Conv2D
from keras_mp.fp8.window import Window

PATH = "block/conv"


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


def run(recipe, window, x, w, g, jit=True, dtype="float32", history=None):
    """Result and gradients, in float64."""
    known = None if history is None else keras.ops.convert_to_tensor(history)
    options = {"dtype": dtype, "path": PATH, "history": known, "part": None}
    both = with_gradients(lambda x, w: convolution(x, w, recipe, window, **options))
    operands = *tensors(x, dtype=dtype), *tensors(w), *tensors(g, dtype=dtype)
    return [to_numpy(each) for each in (compiled(both) if jit else both)(*operands)]


def quantized(x, step=None):
    scale = scale_of(amax(x))
    return integers(x, scale, None if step is None else words(np.shape(x), 0, step, variable(PATH))), scale


# Lengths, kernel, strides, dilations, same; channels and filters are 3 and 5.
WINDOWS = {
    "plain": ((6, 5), (3, 3), (1, 1), (1, 1), True),
    "valid": ((6, 5), (3, 2), (1, 1), (1, 1), False),
    "strides": ((7, 6), (3, 3), (2, 3), (1, 1), True),
    "strides that leave rows over": ((8, 9), (3, 2), (3, 2), (1, 1), False),
    "strides past the kernel": ((7, 8), (1, 1), (2, 3), (1, 1), True),
    "dilated": ((7, 8), (3, 2), (1, 1), (2, 3), True),
    "dilated, valid": ((7, 8), (3, 2), (1, 1), (2, 3), False),
    "even": ((5, 4), (2, 4), (1, 1), (1, 1), True),
    "one place": ((1, 1), (3, 3), (1, 1), (1, 1), True),
    "larger than the input": ((2, 3), (5, 7), (1, 1), (1, 1), True),
}


def operands(name, batch=2, channels=3, filters=5):
    """The window, and inputs, kernel and upstream gradient."""
    lengths, sizes, *geometry = WINDOWS[name]
    x, w = normal(batch, *lengths, channels), normal(*sizes, channels, filters)
    return Window(sizes, *geometry), x, w, normal(*convolved.result(x, w, *geometry).shape)


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.ci), True])
@pytest.mark.parametrize("name", few(WINDOWS, "strides that leave rows over", "dilated"))
def test_every_integer_and_scale(name, jit):
    window, x, w, g = operands(name)
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    for kernel_gradient in ("compute", "int8"):
        y, dx, dw = run(Int8Scaling(kernel_gradient=kernel_gradient), window, x, w, g, jit)
        np.testing.assert_array_equal(y, divided(convolved.result(x8, w8, *window[1:]), sx, sw))
        np.testing.assert_array_equal(dx, divided(convolved.of_inputs(x.shape, g8, w8, *window[1:]), sg, sw))
        # Floats whatever the recipe says; a sum rounds by half a unit in each addition.
        x64, g64 = x.astype("float64"), g.astype("float64")
        exact = convolved.of_kernel(x64, g64, w.shape, *window[1:])
        terms = convolved.of_kernel(np.abs(x64), np.abs(g64), w.shape, *window[1:])
        assert np.all(np.abs(dw - exact) <= g[..., 0].size * 2.0**-23 * terms)


@pytest.mark.parametrize("name", few(["one channel", "zeros", "huge", "tiny"], "one channel"))
def test_values_and_widths_that_break_naive_code(name):
    window, x, w, g = operands("strides", channels=1, filters=1) if name == "one channel" else operands("strides")
    factor = {"zeros": 0, "huge": 1e37, "tiny": 1e-30}.get(name, 1)
    x, w = x * np.float32(factor), w / np.float32(max(factor, 1) ** 0.5)
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    y, dx, _ = run(Int8Scaling(), window, x, w, g)
    np.testing.assert_array_equal(y, divided(convolved.result(x8, w8, *window[1:]), sx, sw))
    np.testing.assert_array_equal(dx, divided(convolved.of_inputs(x.shape, g8, w8, *window[1:]), sg, sw))


@pytest.mark.ci
def test_bfloat16_tensors_and_a_kernel_in_float32():
    window, *arrays = operands("plain")
    x, w, g = (to_numpy(keras.ops.cast(each, "bfloat16")).astype("float32") for each in arrays)
    w = w + 2.0**-12
    y, dx, dw = run(Int8Scaling(), window, x, w, g, dtype="bfloat16")
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    expected = divided(convolved.result(x8, w8, *window[1:]), sx, sw)
    np.testing.assert_array_equal(y, to_numpy(keras.ops.cast(expected, "bfloat16")))
    expected = divided(convolved.of_inputs(x.shape, g8, w8, *window[1:]), sg, sw)
    np.testing.assert_array_equal(dx, to_numpy(keras.ops.cast(expected, "bfloat16")))
    exact = convolved.of_kernel(x.astype("float64"), g.astype("float64"), w.shape, *window[1:])
    np.testing.assert_allclose(dw, exact, atol=2.0**-8 * np.abs(exact).max())


@pytest.mark.parametrize("bad", few([np.inf, -np.inf, np.nan], np.nan))
@pytest.mark.parametrize("scales", few(["delayed", "static"], "delayed"))
def test_what_is_not_finite_is_never_a_silent_integer(scales, bad):
    recipe = Int8Scaling(scales)
    history = np.ones((3, recipe.history_length + 1), "float32") * 100
    for spoiled in range(3):
        window, *arrays = operands("plain")
        arrays[spoiled].flat[4] = bad
        y, dx, dw = run(recipe, window, *arrays, history=history)
        for result, roles in ((y, (0, 1)), (dx, (2, 1))):
            assert np.isnan(result).all() if spoiled in roles else np.isfinite(result).all()
        assert not np.isfinite(dw).all() if spoiled in (0, 2) else np.isfinite(dw).all()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has sizes that are not known")
@pytest.mark.parametrize("name", few(WINDOWS, "strides"))
def test_batch_and_lengths_that_are_unknown_when_traced(name):
    import tensorflow as tf

    window, x, w, g = operands(name)

    def both(x, w, g):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = convolution(x, w, Int8Scaling(), window, dtype="float32", path=PATH, history=None, part=None)
        return y, *tape.gradient(y, [x, w], g)

    for known in ((None, *x.shape[1:]), (None, None, None, x.shape[-1])):
        unknown = (*([None] * 3), w.shape[-1])
        specs = [tf.TensorSpec(shape) for shape in (known, w.shape, unknown)]
        results = tf.function(both, input_signature=specs)(x, w, g)
        for actual, expected in zip(results[:2], run(Int8Scaling(), window, x, w, g)[:2], strict=True):
            np.testing.assert_array_equal(to_numpy(actual), expected)


@pytest.mark.ci
def test_an_empty_batch():
    window, x, w, g = operands("strides", batch=0)
    y, dx, dw = run(Int8Scaling(), window, x, w, g)
    assert y.shape == g.shape and dx.shape == x.shape and not dw.any()


def network(**arguments):
    """A convolution that is called twice between two that stay as they are, by their kinds."""
    inputs = keras.Input((8, 8, 3))
    shared = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="shared", **arguments)
    x = keras.layers.Conv2D(16, 3, strides=2, padding="same", name="stem")(inputs)
    x = keras.layers.DepthwiseConv2D(3, name="depthwise")(shared(keras.layers.LayerNormalization()(shared(x))))
    x = keras.layers.Conv2D(16, 1, groups=2, name="groups")(x)
    return keras.Model(inputs, keras.layers.Dense(4, dtype="float32", name="head")(keras.layers.Flatten()(x)))


def of_kind(model):
    return [layer.name for layer in model.layers if isinstance(layer, Int8Conv2D)]


def convolutions(path, layer):
    return isinstance(layer, keras.layers.Conv2D)


@pytest.mark.usefixtures("mixed_bfloat16")
def test_converted_trained_saved_loaded_and_reverted(tmp_path):
    model, x, y = network(), normal(12, 8, 8, 3), normal(12, 4)
    before = to_numpy(model(x))
    int8 = convert(model, Int8Scaling(), select=convolutions)
    assert of_kind(int8) == ["stem", "shared"] and not of_kind(revert(int8))
    np.testing.assert_array_equal(to_numpy(revert(int8)(x)), before)
    assert 0 < np.linalg.norm(to_numpy(int8(x)) - before) < 0.05 * np.linalg.norm(before)
    int8.compile(keras.optimizers.Adam(0.01), "mse")
    losses = int8.fit(x, y, epochs=12, batch_size=5, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    int8.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (int8, loaded):
        each.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    for old, new in zip(int8.trainable_weights, loaded.trainable_weights, strict=True):
        if "amax_history" not in old.path:  # what is loaded lies in the slot of the first call
            np.testing.assert_array_equal(to_numpy(old), to_numpy(new))


@pytest.mark.ci
@pytest.mark.usefixtures("mixed_bfloat16")
def test_exported_as_plain_float32_layers(tmp_path):
    pytest.importorskip("tensorflow", reason="a SavedModel needs TensorFlow")
    int8 = convert(network(), Int8Scaling("static"), select=convolutions)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stabilize")
        int8 = keras_mp.stabilize(int8)
    report = keras_mp.export_float32(int8, tmp_path / "saved", verify=normal(3, 8, 8, 3))
    assert report.low_precision_ops == 0 and report.max_difference <= 1e-5


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*compute in float32")
def test_lora_trains_beside_a_kernel_that_stays(tmp_path):
    model = network()
    model.get_layer("shared").enable_lora(4)
    int8 = convert(model, Int8Scaling(), select=convolutions)
    shared = int8.get_layer("shared")
    before, start = to_numpy(shared._kernel), to_numpy(shared.kernel)
    int8.compile("adam", "mse")
    int8.fit(normal(8, 8, 8, 3), normal(8, 4), epochs=3, verbose=0)
    np.testing.assert_array_equal(to_numpy(shared._kernel), before)
    assert not np.array_equal(to_numpy(shared.kernel), start)


@pytest.mark.once
def test_what_is_left_alone_and_why(capsys):
    class Own(keras.layers.Conv2D):
        pass

    inputs = keras.Input((8, 8, 16))
    x = inputs
    layers = [
        keras.layers.Conv2D(16, 3, padding="same", name="first"),
        keras.layers.Conv2D(16, 3, padding="same", groups=4, name="groups"),
        Own(16, 3, padding="same", name="own"),
        keras.layers.Conv2D(16, 3, padding="same", name="plain"),
        keras.layers.Conv2D(16, 3, padding="same", name="last"),
    ]
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, x)
    reasons = {row.path: row.reason for row in explain(model, recipe=Int8Scaling(), select=lambda path, layer: True)}
    assert reasons["groups"] == "it has groups=4" and reasons["plain"] == "select chose it"
    assert reasons["own"].startswith("Own has code of its own")
    assert "nobody has measured" in {row.path: row.reason for row in explain(model, recipe=Int8Scaling())}["plain"]
    assert "144 x 16" in capsys.readouterr().out
    # Other scaling recipes are not for convolutions.
    for recipe in (Int8Scaling("current"), CurrentScaling()):
        assert explain(model, recipe=recipe) == []
        with pytest.raises(ValueError, match="does not convolve: use Int8Scaling"):
            Int8Conv2D(4, 3, recipe=recipe)
    first = keras.Sequential([keras.Input((16, 8, 8)), keras.layers.Conv2D(4, 3, data_format="channels_first")])
    assert explain(first, recipe=Int8Scaling())[0].reason == "its data_format is 'channels_first'"
    with pytest.raises(ValueError, match="channels, which are the last axis, but it has groups=2"):
        Int8Conv2D(4, 3, groups=2)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*compute in float32")
def test_converted_again_to_fp8_convolutions_stay_in_int8():
    int8 = convert(network(), Int8Scaling(), select=lambda path, layer: True)
    with pytest.warns(UserWarning, match="head change from Int8Scaling"):
        fp8 = convert(int8, CurrentScaling(), select=lambda path, layer: True)
    assert of_kind(fp8) == ["stem", "shared"]
    assert {str(fp8.get_layer(name).recipe) for name in of_kind(fp8)} == {"Int8Scaling()"}
    assert fp8.get_layer("head").recipe == CurrentScaling()
