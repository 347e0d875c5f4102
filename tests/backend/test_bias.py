"""The gradient of a bias in bfloat16 on a CPU, beside float64."""

import keras
import ml_dtypes
import numpy as np
import pytest
from jitted_programs import step_scope, with_islands

import keras_mp
from keras_mp import backend

if keras.backend.backend() != "tensorflow":
    pytest.skip("XLA sums in float32", allow_module_level=True)

import tensorflow as tf

HOSTILE = [np.inf, -np.inf, np.nan, 3e38, 2.0**-133]


def gradients(x, bias, upstream, scope=step_scope, graph=True, **function):
    """Of x and of the bias, and the operations of the graph."""

    def step(x, bias, upstream):
        with scope(), tf.GradientTape() as tape:
            tape.watch([x, bias])
            y = keras.ops.add(x, bias)
        return tape.gradient(y, [x, bias], upstream)

    tensors = [tf.convert_to_tensor(value) for value in (x, bias, upstream)]
    if not graph:
        return step(*tensors), set()
    specs = [tf.TensorSpec((None, *t.shape[1:]) if t.shape.rank > 1 else t.shape, t.dtype) for t in tensors]
    traced = tf.function(step, specs, autograph=False, **function)
    return traced(*tensors), {op.type for op in traced.get_concrete_function().graph.get_operations()}


def draw(*shape, dtype="bfloat16"):
    rng = np.random.default_rng()
    return [tf.cast(rng.normal(size=size), dtype) for size in (shape, shape[-1:], shape)]


def wide(tensor):
    return tf.cast(tensor, tf.float64).numpy()


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("shape", [(4096, 3), (1, 7), (3, 40, 30, 2), (0, 4)], ids=str)
def test_the_sum_is_that_of_float64_rounded_once(shape, graph):
    x, bias, upstream = draw(*shape)
    (to_x, to_bias), operations = gradients(x, bias, upstream, graph=graph)
    expected = wide(upstream).reshape(-1, shape[-1]).sum(0)
    # One rounding to 8 bits, and float32's sums.
    np.testing.assert_allclose(wide(to_bias), expected, rtol=2.0**-8, atol=1e-6 * wide(abs(upstream)).sum())
    np.testing.assert_array_equal(wide(to_x), wide(upstream))
    assert "BiasAddGrad" not in operations


def test_without_it_tensorflow_sums_in_bfloat16():
    # 257 in bfloat16 is 256, so that the sum of ones stops there.
    x, bias, _ = draw(4096, 3)
    ones = tf.ones_like(x)
    (_, own), operations = gradients(x, bias, ones, backend.without_islands)
    (_, ours), _ = gradients(x, bias, ones)
    assert "BiasAddGrad" in operations
    np.testing.assert_array_equal(wide(ours), 4096.0)
    assert np.all(wide(own) < 4096.0)


def test_values_that_break_naive_code():
    x, bias, upstream = draw(5, 3)
    altered = [tf.tensor_scatter_nd_update(tf.cast(upstream, "float32"), [[2, 1]], [value]) for value in HOSTILE]
    for each in (tf.zeros_like(upstream), *(tf.cast(value, "bfloat16") for value in altered)):
        (_, to_bias), _ = gradients(x, bias, each)
        expected = np.asarray(wide(each).sum(0), ml_dtypes.bfloat16).astype("float64")
        np.testing.assert_allclose(wide(to_bias), expected, rtol=2.0**-7)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_stay_as_they_are(dtype):
    # float16 is summed in float32 there.
    _, operations = gradients(*draw(8, 3, dtype=dtype))
    assert "BiasAddGrad" in operations


def test_in_a_jitted_step_and_in_inference_it_is_keras_own():
    x, bias, upstream = draw(8, 3)
    _, operations = gradients(x, bias, upstream, jit_compile=True)
    assert "BiasAddGrad" in operations
    with step_scope():
        graph = tf.function(lambda x: keras.ops.add(x, bias), autograph=False).get_concrete_function(x).graph
    assert "IdentityN" not in {operation.type for operation in graph.get_operations()}


def test_sparse_and_mismatched_operands_are_keras_own():
    with step_scope(), tf.GradientTape():
        sparse = tf.sparse.from_dense(tf.eye(3))
        assert isinstance(keras.ops.add(sparse, sparse), tf.SparseTensor)
        np.testing.assert_array_equal(keras.ops.add(np.ones((2, 3), "float32"), 1.0), 2.0)
        with pytest.raises(tf.errors.InvalidArgumentError):
            keras.ops.add(tf.zeros((2, 3)), tf.zeros((2, 4)))


@pytest.mark.parametrize("islands", [True, False])
def test_a_prepared_model_has_it(islands):
    """A step of SGD moves a bias by the sum of the gradients of 2,048 rows, which in bfloat16 stops at 256."""
    with keras_mp.set_global_policy("mixed_bfloat16"):
        layers = [keras.layers.Dense(2, kernel_initializer="zeros"), keras.layers.Activation("linear", dtype="float32")]
        model = keras.Sequential([keras.Input((2048, 4)), *layers])
        model = keras_mp.prepare(model, keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=(1, 2)))
    with with_islands(islands):
        model.fit(np.zeros((1, 2048, 4), "float32"), np.zeros((1, 2048, 2), "float32"), verbose=0)
    np.testing.assert_array_equal(model.layers[0].bias.numpy(), -2048.0)


@pytest.mark.parametrize(
    "shape, known", [((3, 5, 8), True), ((2, 3, 4, 8), False), ((2, 3, 4, 8), True), ((0, 5, 8), False)], ids=str
)
def test_it_is_added_to_the_product_itself_which_is_then_one_kernel(known, shape):
    rng = np.random.default_rng()
    layer = keras.layers.Dense(6, dtype="mixed_bfloat16")
    layer.build(shape)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    x = tf.cast(rng.normal(size=shape), tf.bfloat16)
    upstream = tf.cast(rng.normal(size=(*shape[:-1], 6)), tf.bfloat16)
    middle = shape[1:-1] if known else [None] * len(shape[1:-1])

    def step(x, upstream):
        with step_scope(), tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        assert y.shape[1:-1].as_list() == list(middle)
        return y, *tape.gradient(y, [x, *(weight.value for weight in layer.weights)], upstream)

    specs = [tf.TensorSpec((None, *middle, size), tf.bfloat16) for size in (8, 6)]
    traced = tf.function(step, specs, autograph=False)
    (added,) = (op for op in traced.get_concrete_function().graph.get_operations() if op.type == "BiasAdd")
    assert added.inputs[0].op.type == "MatMul"
    y, to_x, to_kernel, to_bias = map(wide, traced(x, upstream))
    kernel, bias = (wide(tf.cast(weight.value, tf.bfloat16)) for weight in layer.weights)
    rows, up = wide(x).reshape(-1, 8), wide(upstream).reshape(-1, 6)
    for ours, right in (
        (y, (rows @ kernel + bias).reshape(y.shape)),
        (to_x, (up @ kernel.T).reshape(x.shape)),
        (to_kernel, rows.T @ up),
        (to_bias, up.sum(0)),
    ):
        # Twice a rounding to 8 bits, and float32's sums.
        np.testing.assert_allclose(ours, right, rtol=2.0**-7, atol=2.0**-7)
