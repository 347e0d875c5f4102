"""The gradient of a convolution's kernel as products of matrices, beside float64 and beside TensorFlow's kernel."""

import itertools

import keras
import numpy as np
import pytest
from jitted_programs import step_scope, with_islands

import keras_mp
from keras_mp import backend

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX's step is one program, whose compiler chooses", allow_module_level=True)

import tensorflow as tf

from keras_mp.lean import _tensorflow_step

# (batch, height, width, channels, filters), (kernel), (strides)
CASES = [
    ((2, 4, 4, 256, 3), (3, 3), (1, 1)),
    ((1, 1, 5, 256, 2), (3, 2), (1, 1)),
    ((3, 5, 4, 256, 1), (1, 3), (1, 1)),
    ((2, 8, 8, 128, 3), (3, 3), (2, 2)),
    ((2, 9, 7, 128, 3), (3, 3), (2, 2)),
    ((2, 9, 12, 128, 2), (2, 5), (3, 2)),
    ((2, 7, 7, 128, 2), (2, 2), (3, 3)),
    ((2, 6, 7, 128, 2), (5, 4), (2, 1)),
    ((2, 8, 8, 64, 3), (3, 3), (2, 2)),
    ((2, 8, 12, 3, 5), (4, 4), (4, 4)),
    ((2, 9, 7, 3, 5), (4, 2), (4, 2)),
    ((4, 6, 5, 3, 7), (1, 1), (1, 1)),
]


def gradients(x, kernel, upstream, steps, padding, scope=step_scope, batch=None):
    """Of x and of the kernel, in float64, and the operations of the graph."""

    def step(x, upstream):
        with scope(), tf.GradientTape() as tape:
            tape.watch([x, weights])
            y = keras.ops.conv(x, weights, steps, padding)
        return tape.gradient(y, [x, weights], upstream)

    weights = tf.constant(kernel)
    specs = [tf.TensorSpec((batch, *tensor.shape[1:]), tensor.dtype) for tensor in (x, upstream)]
    traced = tf.function(step, specs, autograph=False)
    operations = {operation.type for operation in traced.get_concrete_function().graph.get_operations()}
    return [tf.cast(gradient, tf.float64).numpy() for gradient in traced(x, upstream)], operations


def draw(sizes, size, steps, padding):
    batch, height, width, channels, filters = sizes
    rng = np.random.default_rng()
    x, kernel = (
        tf.cast(rng.normal(size=shape), tf.bfloat16)
        for shape in ((batch, height, width, channels), (*size, channels, filters))
    )
    y = tf.nn.conv2d(x, kernel, steps, padding.upper())
    return x, kernel, tf.cast(rng.normal(size=y.shape), tf.bfloat16)


def kernel_gradient(x, shape, upstream, steps, padding):
    """In float64, window by window."""
    x, upstream = (tf.cast(tensor, tf.float64).numpy() for tensor in (x, upstream))
    befores, afters = [], []
    for side, size, step, output in zip(x.shape[1:3], shape[:2], steps, upstream.shape[1:3], strict=True):
        total = max((output - 1) * step + size - side, 0) if padding == "same" else 0
        befores.append(total // 2)
        afters.append(total - total // 2)
    x = np.pad(x, ((0, 0), *zip(befores, afters, strict=True), (0, 0)))
    result = np.zeros(shape)
    for i, j in itertools.product(range(upstream.shape[1]), range(upstream.shape[2])):
        top, left = i * steps[0], j * steps[1]
        window = x[:, top : top + shape[0], left : left + shape[1]]
        result += np.einsum("bijc,bf->ijcf", window, upstream[:, i, j])
    return result


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_beside_float64_and_beside_tensorflow(case, padding):
    sizes, size, steps = case
    if padding == "valid" and (sizes[1] < size[0] or sizes[2] < size[1]):
        size = tuple(map(min, size, sizes[1:3]))
    x, kernel, upstream = draw(sizes, size, steps, padding)
    for batch in (None, sizes[0]):
        (to_x, to_kernel), operations = gradients(x, kernel, upstream, steps, padding, batch=batch)
        assert "Conv2DBackpropFilter" not in operations
        expected = kernel_gradient(x, kernel.shape, upstream, steps, padding)
        # Sums in float32, rounded once.
        np.testing.assert_allclose(to_kernel, expected, rtol=2**-8, atol=1e-5 * np.abs(expected).max())
    (own_x, _), operations = gradients(x, kernel, upstream, steps, padding, backend.without_islands)
    assert "Conv2DBackpropFilter" in operations
    np.testing.assert_array_equal(to_x, own_x)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, 3e38])
def test_values_that_break_naive_code(value):
    x, kernel, upstream = draw((2, 4, 4, 256, 2), (3, 3), (1, 1), "same")
    x = tf.tensor_scatter_nd_update(x, [[0, 1, 1, 0]], tf.cast([value], tf.bfloat16))
    (_, one), _ = gradients(x, kernel, upstream, (1, 1), "same")
    (_, other), _ = gradients(x, kernel, upstream, (1, 1), "same", backend.without_islands)
    np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
    others = np.isfinite(other)
    np.testing.assert_allclose(one[others], other[others], rtol=2**-6, atol=2**-4)


def test_an_empty_batch_has_no_gradient():
    x, kernel, upstream = draw((2, 4, 4, 256, 2), (3, 3), (1, 1), "same")
    (_, to_kernel), _ = gradients(x[:0], kernel, upstream[:0], (1, 1), "same")
    np.testing.assert_array_equal(to_kernel, 0.0)


@pytest.mark.parametrize(
    ("sizes", "size", "steps", "dtype"),
    [
        ((2, 16, 16, 64, 64), (3, 3), (1, 1), "bfloat16"),  # slower
        ((2, 16, 16, 32, 64), (3, 3), (2, 2), "bfloat16"),  # slower
        ((2, 4, 4, 8, 8), (1, 1), (2, 2), "bfloat16"),  # slower
        ((2, 4, 4, 256, 8), (3, 3), (1, 1), "float32"),  # not measured
    ],
)
def test_what_is_not_faster_stays_as_it_is(sizes, size, steps, dtype):
    tensors = (tf.cast(tensor, dtype) for tensor in draw(sizes, size, steps, "same"))
    _, operations = gradients(*tensors, steps, "same")
    assert "Conv2DBackpropFilter" in operations


def test_a_grouped_convolution_stays_as_it_is():
    x, kernel = tf.zeros((2, 4, 4, 512), tf.bfloat16), tf.zeros((3, 3, 256, 8), tf.bfloat16)
    assert not _tensorflow_step._is_faster(x, kernel, (1, 1))


def test_a_prepared_model_trains_as_without():
    losses = []
    for islands in (True, False):
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Conv2D(256, 1), keras.layers.Conv2D(16, 3, 2), keras.layers.Flatten()]
        for layer in (*layers, dense := keras.layers.Dense(1)):
            layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
        model = keras.Sequential([keras.Input((6, 6, 8)), *layers, dense])
        model = keras_mp.prepare(model, keras.optimizers.SGD(0.01), "mse")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(20, 6, 6, 8)), rng.normal(size=(20, 1))
        with with_islands(islands):
            history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=0.02)
    assert losses[0][-1] < losses[0][0]
