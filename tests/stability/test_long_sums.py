"""Sums of 4,096 and more terms in 16 bits: every layer in keras.layers that adds up."""

import keras
import long_sums
import numpy as np
import pytest
import zoo
from keras import layers
from long_sums import ALLOWED, CASES, LARGEST, NUMPY, ROUNDING, SCALES

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers

TENSORFLOW = keras.backend.backend() == "tensorflow"
# Of the cases that lose, those whose sum is a product's. Accelerators add it up in float32; TensorFlow's kernels for a
# CPU do so in bfloat16's products, and in float16's they do not.
PRODUCTS = (
    "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose", "DepthwiseConv1D", "DepthwiseConv2D", "EinsumDense",
    "SeparableConv1D", "SeparableConv2D",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_layer_loses_a_long_sum_after_stabilize():
    kept, mended, wrong = [], [], []
    for case, (name, *_) in CASES.items():
        for low in ROUNDING:
            for scale in SCALES:
                row = f"{case}, {low}, inputs about {scale:g}"
                plain = long_sums.error(case, low, scale)
                if plain is None:  # more than the dtype holds
                    continue
                if plain != "no kernel" and plain <= ALLOWED:
                    kept.append(row)
                    continue
                after = long_sums.error(case, low, scale, stabilized=True)
                if after not in (None, "no kernel") and after <= ALLOWED:
                    mended.append(f"{row}: {plain} units, then {after}")
                elif not (plain == "no kernel" and "Max" in name):
                    if not (TENSORFLOW and low == "float16" and name in PRODUCTS):
                        wrong.append(f"{row}: {plain} units, then {after}")
    print("\n".join(mended))
    assert wrong == []
    assert len(kept) > 100 and len(mended) > 10, (len(kept), len(mended))


def numbers(low, scale, *shape):
    return (zoo.rng().uniform(0.5, 1.5, shape) * scale).astype(NUMPY[low]).astype("float64")


def middle(layer, inputs, low, **keywords):
    """A layer inside a stabilized model of 16 bits: its result, and the gradient of the sum of its results."""
    keras.config.set_dtype_policy(f"mixed_{low}")
    symbols = [keras.Input(x.shape[1:]) for x in inputs]
    keras.config.set_dtype_policy("float32")
    result = layer(symbols if len(symbols) > 1 else symbols[0], **keywords)
    model = keras.Model(symbols, layers.Dense(1, dtype="float32")(layers.Flatten(dtype="float32")(result)))
    assert layer in [entry.layer for entry in sensitive_layers(model)]
    stable = keras_mp.stabilize(model)
    assert sensitive_layers(stable) == []
    (treated,) = (each for each in stable.layers if isinstance(each, type(layer)) and each.name == layer.name)
    part = keras.Model(stable.inputs, treated.output)
    assert keras.backend.standardize_dtype(treated.output.dtype) == low
    return keras.ops.convert_to_numpy(keras.ops.cast(part(inputs), "float32"))


def close(actual, expected, low):
    assert np.abs(expected).max() <= LARGEST[low]
    np.testing.assert_allclose(actual, expected, atol=ALLOWED * ROUNDING[low] * np.abs(expected).max(), rtol=0)


both = pytest.mark.parametrize("low", list(ROUNDING))


@pytest.mark.jax
@both
@pytest.mark.parametrize("value", [20.0, 3.0])
def test_masked_average_pooling_of_5000_steps_is_their_mean(low, value):
    mask = zoo.rng().random((2, 5000)) < 0.9
    x = np.full((2, 5000, 3), value)
    x[~mask] = -1.0
    masking = layers.Masking(-1.0, dtype=f"mixed_{low}")
    inputs = keras.Input((5000, 3))
    pooled = layers.GlobalAveragePooling1D(dtype=f"mixed_{low}")(masking(inputs))
    model = keras_mp.stabilize(keras.Model(inputs, layers.Dense(1, dtype="float32")(pooled)))
    result = keras.Model(model.inputs, model.layers[-2].output)([x])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(keras.ops.cast(result, "float32")), value)


def cosine(x, y):
    return (x * y).sum(-1, keepdims=True) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))[:, None]


SUMS = [
    ("AveragePooling2D", {"pool_size": 64, "padding": "valid"}, [(64, 64, 3)], lambda x: x.mean((1, 2), keepdims=True)),
    ("AveragePooling2D", {"pool_size": 64, "padding": "same"}, [(64, 64, 3)], lambda x: x.mean((1, 2), keepdims=True)),
    ("Add", {}, [(3,)] * 64, lambda *x: np.sum(x, 0)),
    ("Average", {}, [(3,)] * 64, lambda *x: np.mean(x, 0)),
    ("Dot", {"axes": -1, "normalize": True}, [(4096,)] * 2, cosine),
]
if hasattr(layers, "AdaptiveAveragePooling2D"):  # Keras 3.12 has none
    halves = lambda x: x.reshape(2, 2, 64, 64, 3).mean((2, 3))[:, :, None]  # noqa: E731
    SUMS.append(("AdaptiveAveragePooling2D", {"output_size": (2, 1)}, [(128, 64, 3)], halves))
    rows = lambda x: x.reshape(2, 2, -1, 3).mean(2)  # noqa: E731
    SUMS.append(("AdaptiveAveragePooling1D", {"output_size": 2}, [(8192, 3)], rows))


@pytest.mark.jax
@both
@pytest.mark.parametrize("name, arguments, shapes, exact", SUMS)
def test_means_sums_and_cosines_of_many_terms_are_those_of_numpy(low, name, arguments, shapes, exact):
    inputs = [numbers(low, 20 if name != "Add" and name != "Average" else 1, 2, *shape) for shape in shapes]
    close(middle(getattr(layers, name)(**arguments, dtype=f"mixed_{low}"), inputs, low), exact(*inputs), low)


def gradient_of_first(layer, inputs, upstream, low):
    """The gradient of the first input, given that of the result."""

    def loss(first):
        result = layer([first, *others] if others else first)
        return keras.ops.sum(keras.ops.cast(result, "float32") * upstream.astype("float32"))

    first, *others = [keras.ops.cast(x, low) for x in inputs]
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(first)
            value = loss(first)
        gradient = tape.gradient(value, first)
    else:
        import jax

        gradient = jax.grad(loss)(first)
    return keras.ops.convert_to_numpy(keras.ops.cast(gradient, "float32"))


@pytest.mark.jax
@both
def test_the_gradients_of_many_copies_are_added_up(low):
    upstream = numbers(low, 1, 2, 8192, 3)
    inputs = keras.Input((3,))
    copies = layers.RepeatVector(8192, dtype=f"mixed_{low}")(inputs)
    layer = keras_mp.stabilize(keras.Model(inputs, layers.Dense(1, dtype="float32")(copies))).layers[1]
    close(gradient_of_first(layer, [np.ones((2, 3))], upstream, low), upstream.sum(1), low)


@pytest.mark.jax
@both
@pytest.mark.parametrize("name", ["Add", "Subtract", "Multiply", "Average"])
@pytest.mark.parametrize("shape", [(1, 1, 3), (3,), (1, 64, 3)])
def test_the_gradients_of_an_input_that_is_repeated_are_added_up(low, name, shape):
    gates, image, upstream = (numbers(low, 1, 2, *s) for s in (shape, (64, 64, 3), (64, 64, 3)))
    symbols = [keras.Input(shape), keras.Input((None, 64, 3))]
    merged = getattr(layers, name)(dtype=f"mixed_{low}")(symbols)
    layer = keras_mp.stabilize(keras.Model(symbols, layers.Dense(1, dtype="float32")(merged))).layers[2]
    factor = {"Multiply": image, "Average": 0.5}.get(name, 1.0)
    repeated = tuple(axis for axis in (1, 2) if len(shape) == 1 or shape[axis - 1] == 1)
    expected = (upstream * factor).sum(repeated).reshape(gates.shape)
    close(gradient_of_first(layer, [gates, image], upstream, low), expected, low)


@pytest.mark.jax
@both
def test_an_axis_that_the_kernel_does_not_have_is_added_up(low):
    x = numbers(low, 1, 2, 5000, 3)
    layer = layers.EinsumDense("abc,cd->ad", 4, kernel_initializer="orthogonal", dtype=f"mixed_{low}")
    actual = middle(layer, [x], low)
    close(actual, np.einsum("abc,cd->ad", x, keras.ops.convert_to_numpy(layer.kernel)), low)


@pytest.mark.jax
@both
def test_such_an_axis_of_the_output_layer_is_added_up_and_trains(low):
    x = numbers(low, 1, 2, 5000, 3)
    keras.config.set_dtype_policy(f"mixed_{low}")
    inputs = keras.Input((5000, 3))
    model = keras_mp.stabilize(keras.Model(inputs, layers.EinsumDense("abc,cd->ad", 4)(inputs)))
    kernel = keras.ops.convert_to_numpy(model.layers[-1].kernel)
    actual = keras.ops.convert_to_numpy(model(x))
    assert actual.dtype == "float32"
    np.testing.assert_allclose(actual, np.einsum("abc,cd->ad", x, kernel), rtol=0, atol=1e-5 * 5000)
    model.compile(keras.optimizers.SGD(1e-9), "mse", auto_scale_loss=False)
    model.fit(x, np.zeros((2, 4)), verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


@both
def test_small_windows_and_few_inputs_stay_in_16_bits(low):
    keras.config.set_dtype_policy(f"mixed_{low}")
    inputs = keras.Input((8, 8, 3))
    x = layers.AveragePooling2D(4)(layers.Add()([inputs, inputs]))
    x = layers.Multiply()([x, layers.Reshape((2, 2, 1))(layers.Dense(4)(layers.Flatten()(x)))])
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(layers.GlobalAveragePooling2D()(x)))
    assert sensitive_layers(model) == []
