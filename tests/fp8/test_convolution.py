"""INT8 convolutions: each integer against NumPy, and what holds for other converted layers."""

import functools

import keras
import numpy as np
import pytest
from int8_reference import amax, divided, integers, scale_of, variable, words
from reference import compiled, tensors, to_numpy, with_gradients
from twins import twin

from keras_mp.fp8 import CurrentScaling, Int8Scaling, convert, explain, revert
from keras_mp.fp8.convolution import convolution
from keras_mp.fp8.convolution_layer import Int8Conv2D, Int8Convolution
from keras_mp.fp8.window import Window

PATH = "block/conv"


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype("float32")


@functools.cache
def program(window):
    """Operands of one shape share what is compiled."""

    def run(x, w, g, *history):
        options = {"dtype": "float32", "path": PATH, "history": history[0] if history else None, "part": None}
        return with_gradients(lambda x, w: convolution(x, w, Int8Scaling(), window, **options))(x, w, g)

    return compiled(run)


def quantized(x, step=None):
    scale = scale_of(amax(x))
    return integers(x, scale, None if step is None else words(np.shape(x), 0, step, variable(PATH))), scale


# Lengths, channels, filters; kernel, strides, dilations, same.
WINDOWS = {
    "strides": ((7, 6), 1, 1, (3, 3), (2, 3), (1, 1), True),
    "strides that leave rows over": ((8, 9), 3, 5, (3, 2), (3, 2), (1, 1), False),
    "strides past the kernel": ((7, 8), 3, 5, (1, 1), (2, 3), (1, 1), True),
    "dilated": ((7, 8), 3, 5, (3, 2), (1, 1), (2, 3), True),
}


def operands(name):
    """The window; whole numbers as inputs, a kernel, and whole numbers as the upstream gradient."""
    lengths, channels, filters, sizes, *geometry = WINDOWS[name]
    rng, window = np.random.default_rng(), Window(sizes, *geometry)
    x = rng.integers(-99, 100, (2, *lengths, channels)).astype("float32")
    w = rng.normal(size=(*sizes, channels, filters)).astype("float32")
    shape = convolved(window)(*tensors(x, w)).shape
    return window, x, w, rng.integers(-99, 100, shape).astype("float32")


def convolved(window):
    """Keras's convolution in float32: exact of integers whose sums are below 2^24."""
    padding = "same" if window.same else "valid"
    return lambda x, w: keras.ops.conv(x, w, window.strides, padding, "channels_last", window.dilations)


def expected(window, x, w, g):
    """The result and the gradients."""
    (x8, sx), (w8, sw), (g8, sg) = quantized(x), quantized(w), quantized(g, step=0)
    exact = compiled(with_gradients(convolved(window)))
    y, dx, _ = (to_numpy(each).astype("int64") for each in exact(*tensors(x8, w8, g8)))
    # The kernel's gradient is of floats, whatever the recipe says.
    return divided(y, sx, sw), divided(dx, sg, sw), to_numpy(exact(*tensors(x, w, g))[2])


@pytest.mark.jax
@pytest.mark.parametrize("name", WINDOWS)
def test_every_integer_and_scale(name):
    window, x, w, g = operands(name)
    for actual, own in zip(program(window)(*tensors(x, w, g)), expected(window, x, w, g), strict=True):
        np.testing.assert_array_equal(to_numpy(actual), own)


def test_what_is_not_finite_is_never_a_silent_integer():
    history = np.ones((3, Int8Scaling().history_length + 1), "float32") * 100
    for spoiled in range(3):
        window, *arrays = operands("dilated")
        arrays[spoiled].flat[4] = np.nan
        y, dx, dw = map(to_numpy, program(window)(*tensors(*arrays, history)))
        for result, roles in ((y, (0, 1)), (dx, (2, 1))):
            assert np.isnan(result).all() if spoiled in roles else np.isfinite(result).all()
        assert not np.isfinite(dw).all() if spoiled in (0, 2) else np.isfinite(dw).all()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has sizes that are not known")
def test_batch_and_lengths_that_are_unknown_when_traced():
    import tensorflow as tf

    window, x, w, g = operands("strides")
    run = with_gradients(
        lambda x, w: convolution(x, w, Int8Scaling(), window, dtype="float32", path=PATH, history=None, part=None)
    )
    specs = [tf.TensorSpec(shape) for shape in ((None, None, None, 1), w.shape, (None, None, None, 1))]
    results = tf.function(run, input_signature=specs, autograph=False)(x, w, g)
    for actual, own in zip(results, expected(window, x, w, g), strict=True):
        np.testing.assert_array_equal(to_numpy(actual), own)


def network():
    inputs = keras.Input((8, 8, 3))
    shared = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="shared")
    x = shared(shared(keras.layers.Conv2D(16, 3, strides=2, padding="same", name="stem")(inputs)))
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(keras.layers.Flatten()(x)))


def of_kind(model):
    return [layer.name for layer in model.layers if isinstance(layer, Int8Convolution)]


@pytest.mark.usefixtures("mixed_bfloat16")
def test_converted_trained_saved_loaded_and_reverted(tmp_path):
    model, x, y = network(), normal(12, 8, 8, 3), normal(12, 4)
    before = to_numpy(model(x))
    int8 = convert(twin(model), Int8Scaling(), select=lambda path, layer: True)
    assert of_kind(int8) == ["stem", "shared"]
    back = revert(twin(int8))
    assert not of_kind(back)
    np.testing.assert_array_equal(to_numpy(back(x)), before)
    assert 0 < np.linalg.norm(to_numpy(int8(x)) - before) < 0.05 * np.linalg.norm(before)
    int8.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    losses = [float(int8.train_on_batch(x, y)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    int8.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(to_numpy(loaded(x)), to_numpy(int8(x)))
    with pytest.warns(UserWarning, match="head change from Int8Scaling"):
        fp8 = convert(twin(loaded), CurrentScaling(), select=lambda path, layer: True)
    # Which does not convolve.
    assert of_kind(fp8) == ["stem", "shared"] and fp8.get_layer("stem").recipe == Int8Scaling()
    assert fp8.get_layer("head").recipe == CurrentScaling()


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
