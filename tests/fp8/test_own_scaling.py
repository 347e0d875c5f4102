"""A scaling written outside the package: in a product, through convert, with a history, and in a file."""

import dataclasses

import keras
import numpy as np
import reference
from own_scaling import CLIPPED, mean_magnitude, narrow
from reference import compiled, tensors, with_gradients

import keras_mp
from keras_mp import fp8


def quantized(x, name, before=0.0):
    """In NumPy: FP8 values and the scale that puts 16 times the mean magnitude at the top."""
    x = np.asarray(x, "float32")
    amax = max(np.float32(16) * np.mean(np.abs(x), dtype="float32"), np.float32(before))
    scale = np.float32(reference.MAX[name]) / amax
    return reference.cast(x * scale, name), np.float32(scale)


def powers(*shape):
    """Powers of two, as many of each: their mean is exact."""
    values = 2.0 ** (np.arange(np.prod(shape)) % 4 - 2)
    signs = np.random.default_rng().choice([-1.0, 1.0], values.size)
    return (np.random.default_rng().permutation(values) * signs).reshape(shape).astype("float32")


def network():
    first = keras.layers.Dense(16, "relu", name="first", dtype="mixed_bfloat16")
    return keras.Sequential([keras.Input((16,)), first, keras.layers.Dense(8, name="last", dtype="mixed_bfloat16")])


def test_a_product_takes_its_scales_from_a_function_and_another_is_in_16_bits():
    x, w, g = powers(8, 16), powers(16, 8), powers(8, 8)
    y, dx, dw = compiled(with_gradients(lambda x, w: fp8.matmul(x, w, CLIPPED)))(*tensors(x, w, g))
    reference.assert_close(y, reference.product("ab,bc->ac", quantized(x, "E4M3"), quantized(w, "E4M3")))
    reference.assert_close(dx, reference.product("ac,bc->ab", quantized(g, "E5M2"), quantized(w, "E4M3")))
    np.testing.assert_array_equal(reference.to_numpy(dw), x.T.astype("float64") @ g)


def test_a_function_is_given_the_amaxes_of_the_updates_before():
    own = dataclasses.replace(narrow, history=3)
    x, w = powers(8, 16), powers(16, 8)
    history = np.array([[0, 100, 7], [0, 0, 0], [0, 0, 0]], "float32")
    y = compiled(lambda x, w, h: fp8.matmul(x, w, own, history=h))(*tensors(x, w, history))
    reference.assert_close(y, reference.product("ab,bc->ac", quantized(x, "E4M3", 100), quantized(w, "E4M3")))
    # Its magnitudes of this update come first, as of delayed scales.
    layer = keras_mp.layers.Float8Dense(8, use_bias=False, scaling=own)
    layer.build((None, 16))
    model = keras.Sequential([keras.Input((16,)), layer])
    model.compile("sgd", "mse", run_eagerly=keras.backend.backend() == "tensorflow")
    model.train_on_batch(x, np.zeros((8, 8)))
    store = {}
    layer.amax_history.save_own_variables(store)
    assert np.asarray(store["0"])[0].tolist() == [2.0, 0.0, 0.0]


def test_a_file_with_a_scaling_of_ones_own_is_loaded(tmp_path):
    model = keras_mp.convert(network(), CLIPPED, select=lambda path, layer: True)
    assert [layer.scaling for layer in model.layers] == [CLIPPED, CLIPPED]
    assert not CLIPPED.takes_parts and "source=mean_magnitude" in str(CLIPPED)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("first").scaling == CLIPPED
    assert loaded.get_layer("last").scaling.forward[0].source is mean_magnitude
    x = powers(8, 16)
    np.testing.assert_array_equal(reference.to_numpy(loaded(x)), reference.to_numpy(model(x)))
