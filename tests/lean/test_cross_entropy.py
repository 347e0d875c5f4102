"""Chunked cross-entropy against NumPy's float64: values, gradients, chunks, memory, bad input."""

import keras
import numpy as np
import pytest
from gradients_of import MODES, value_and_gradients
from keras import ops

import keras_mp
from keras_mp.lean.cross_entropy import chunked_cross_entropy


def expected(features, kernel, bias, targets, weights):
    f, k, b = (each.astype("float64") for each in (features, kernel, bias))
    logits = f @ k + b
    largest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
    wanted = np.arange(len(b)) == targets[:, None]
    losses = (wanted * (log_sum - logits)).sum(-1)
    to_logits = weights[:, None] * (np.exp(logits - log_sum) - wanted)
    return (weights * losses).sum(), to_logits @ k.T, f.T @ to_logits, to_logits.sum(0)


def draw(rows, width, vocabulary, size=1.0):
    generator = np.random.default_rng()
    arrays = [generator.normal(size=shape) * size for shape in ((rows, width), (width, vocabulary), (vocabulary,))]
    weights = generator.random(rows) * (generator.random(rows) > 0.3)
    return [each.astype("float32") for each in arrays], generator.integers(0, vocabulary, rows), weights


def check(arrays, targets, weights, mode="eager", tolerance=1e-5, **arguments):
    def function(features, kernel, bias):
        return chunked_cross_entropy(features, kernel, targets, weights, bias=bias, **arguments)

    right = expected(*arrays, targets, weights)
    found = value_and_gradients(function, arrays, mode)
    for ours, exact in zip(found, right, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize(
    "mode, rows",
    [("jit", None), ("eager", 36), (MODES[-2], 37), pytest.param("jit", 5, marks=pytest.mark.jax), (MODES[-2], 1)],
)
def test_any_chunk_also_one_that_does_not_divide(mode, rows):
    check(*draw(37, 8, 50), mode, rows=rows)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 8, 50), (9, 1, 3), (9, 4, 1)])
def test_small_sizes(sizes):
    arrays, targets, weights = draw(*sizes)
    check(arrays, targets, np.ones_like(weights), tolerance=2e-5, rows=4)


def test_zeros_large_logits_and_rows_that_do_not_count():
    (features, kernel, bias), targets, weights = draw(20, 8, 30, size=20.0)
    check([features, kernel, bias], targets, weights, tolerance=1e-4, rows=7)
    check([features * 0, kernel * 0, bias * 0], targets, weights, rows=7)
    features[3] = np.inf
    weights[3] = 0.0
    total, *_ = value_and_gradients(
        lambda f, k, b: chunked_cross_entropy(f, k, targets, weights, bias=b, rows=7), [features, kernel, bias]
    )
    features[3] = 0.0
    np.testing.assert_allclose(total, expected(features, kernel, bias, targets, weights)[0], rtol=1e-4)
    check([features, kernel, bias], targets, weights * 0, rows=7)


def test_the_kernel_of_an_embedding():
    (features, kernel, bias), targets, weights = draw(20, 8, 30)
    _, to_features, to_kernel, _ = expected(features, kernel, bias * 0, targets, weights)
    _, *found = value_and_gradients(
        lambda f, k: chunked_cross_entropy(f, k, targets, weights, rows=6, vocabulary_first=True), [features, kernel.T]
    )
    np.testing.assert_allclose(found[0], to_features, atol=1e-5 * np.abs(to_features).max())
    np.testing.assert_allclose(found[1], to_kernel.T, atol=1e-5 * np.abs(to_kernel).max())


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 8), pytest.param("float16", 11, marks=pytest.mark.jax)])
def test_sixteen_bit_features_and_a_float32_kernel(dtype, bits):
    (features, kernel, _), targets, weights = draw(64, 16, 200)
    features, kernel = (ops.convert_to_numpy(ops.cast(ops.cast(x, dtype), "float32")) for x in (features, kernel))
    right = expected(features, kernel, np.zeros(200), targets, weights)[:3]
    found = value_and_gradients(
        lambda f, k: chunked_cross_entropy(ops.cast(f, dtype), k, targets, weights, rows=20), [features, kernel], "jit"
    )
    np.testing.assert_allclose(found[0], right[0], rtol=1e-5)  # the operands are what they were: sums are float32
    for ours, exact in zip(found[1:], right[1:], strict=True):
        np.testing.assert_allclose(ours, exact, atol=2.0 ** (1 - bits) * np.abs(exact).max())


def test_gradients_of_rare_words_are_rounded_to_float16_when_they_are_4096_times_as_large():
    kernel = np.array([[0, -10, -15, -18, -20, -22, -24]], "float32")
    _, found = value_and_gradients(
        lambda k: chunked_cross_entropy(ops.ones((1, 1), "float16"), k, np.zeros(1, "int32")), [kernel]
    )
    softmax = np.exp(kernel[0].astype("float64"))
    rare = softmax[1:] / softmax.sum()
    assert np.float16(rare[2]) == 0
    np.testing.assert_array_equal(found[0, 1:], np.float16(rare * 4096).astype("float32") / 4096)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows all sizes")
def test_an_unknown_number_of_rows():
    (features, kernel, bias), targets, weights = draw(23, 8, 50)
    found = value_and_gradients(
        lambda f: chunked_cross_entropy(f, kernel, targets, weights, bias=bias, rows=5), [features], "jit", unknown=(0,)
    )
    for ours, exact in zip(found, expected(features, kernel, bias, targets, weights)[:2], strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_32768_rows_of_50304_take_the_memory_of_a_chunk():
    rows, vocabulary, width = 32768, 50304, 64
    inputs = keras.Input((1024, width))
    logits = keras.layers.Dense(vocabulary, use_bias=False)(inputs)
    model = keras_mp.lean.make_lean(keras.Model(inputs, logits))
    model.compile(keras.optimizers.SGD(0.1), keras_mp.lean.ChunkedCrossEntropy())
    batch = keras.KerasTensor((rows // 1024, 1024, width), "float32"), keras.KerasTensor((rows // 1024, 1024), "int32")
    memory = keras_mp.inspect(model, batch, "host").memory
    chunk, whole = 2**26 * 4, rows * vocabulary * 4
    kernel = width * vocabulary * 4
    print(f"temporary {memory.temporary / 2**20:.0f} MiB; a chunk {chunk / 2**20:.0f}, all {whole / 2**20:.0f}")
    # The chunk's logits and their gradient; the kernel's gradient, also while it is added to; the features'.
    assert memory.temporary < 2.2 * chunk + 4 * kernel + 4 * rows * width * 4 < whole / 8


@pytest.mark.parametrize(
    "shapes, arguments, message",
    [
        (((4, 3), (5, 7), (4,)), {}, "features must have the kernel's width 5 last"),
        (((4, 5), (5, 7), (3,)), {}, r"targets must have the shape .*\(4,\), got \(3,\)"),
        (((4, 5), (5, 7), (4,)), {"weights": np.ones((2, 2))}, r"weights must have the shape .*\(4,\), got \(2, 2\)"),
        (((4, 5), (5, 7), (4,)), {"bias": np.ones(5)}, r"bias must have the shape \(7,\), got \(5,\)"),
        (((4, 5), (5, 7), (4,)), {"rows": 0}, "rows=0 must be a whole number, 1 or more"),
    ],
)
def test_bad_input_is_named(shapes, arguments, message):
    features, kernel, targets = (np.zeros(shape, "float32") for shape in shapes)
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(features, kernel, targets.astype("int32"), **arguments)
