import keras
import numpy as np
import pytest
import zoo
from keras import layers

from keras_mp.stability.accumulate import einsum_float32

TENSORFLOW = keras.backend.backend() == "tensorflow"
EQUATIONS = {
    "ab,bc->ac": ((5, 7), (7, 3)),
    "abc,cd->abd": ((2, 5, 7), (7, 3)),
    "btnh,bsnh->bnts": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "aecd,abcd->acbe": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "ab,b->a": ((4, 8), (8,)),
    "abc,cde->abde": ((1, 1, 7), (7, 1, 3)),
}


def rounded(array, dtype):
    return keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.cast(array, dtype), "float32")).astype("float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_against_float64(equation, dtype):
    left, right = (rounded(zoo.normal(*shape), dtype) for shape in EQUATIONS[equation])
    out = einsum_float32(equation, keras.ops.cast(left, dtype), keras.ops.cast(right, dtype))
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    # Only float32's rounding is left: the same contraction in 16 bits is off by 1e-3 and more.
    np.testing.assert_allclose(keras.ops.convert_to_numpy(out), np.einsum(equation, left, right), rtol=1e-5, atol=1e-5)


def test_past_the_largest_float16():
    """q = k = 60 over 64 dims: 230,400, which float16 cannot hold."""
    sixty = keras.ops.cast(np.full((2, 64), 60.0), "float16")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(einsum_float32("ab,cb->ac", sixty, sixty)), 230400.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_operands_stay_visible(bad):
    left = keras.ops.cast(np.array([[1.0, bad]]), "bfloat16")
    out = keras.ops.convert_to_numpy(einsum_float32("ab,bc->ac", left, keras.ops.cast(np.eye(2), "bfloat16")))
    assert not np.isfinite(out[0, 1])


class Contract(layers.Layer):
    def __init__(self, plain, **kwargs):
        super().__init__(**kwargs)
        self.plain = plain

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

    def call(self, inputs):
        if self.plain:
            return keras.ops.cast(keras.ops.matmul(inputs, self.kernel), "float32")
        return einsum_float32("abc,cd->abd", inputs, keras.ops.cast(self.kernel, inputs.dtype))


@pytest.mark.parametrize("jit", [False, True])
def test_trains_like_a_plain_product_with_unknown_batch_size(jit):
    x, y = zoo.normal(10, 4, 6), zoo.normal(10, 4, 3)  # batches of 4, 4 and 2
    trained = []
    for plain in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4, 6)), Contract(plain, dtype="mixed_bfloat16")])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
        before = keras.ops.convert_to_numpy(model.weights[0])
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained.append(keras.ops.convert_to_numpy(model.weights[0]))
    assert np.abs(trained[0] - before).max() > 0.01
    np.testing.assert_allclose(trained[0], trained[1], atol=3e-3)


def gradients(equation, left, right, weights, how):
    """Gradients of sum(weights * contraction), in eager mode, as a graph, or compiled."""

    def loss(left, right):
        return keras.ops.sum(einsum_float32(equation, left, right) * weights)

    if not TENSORFLOW:
        import jax

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(left, right)
    import tensorflow as tf

    def function(left, right):
        with tf.GradientTape() as tape:
            tape.watch((left, right))
            value = loss(left, right)
        return tape.gradient(value, (left, right))

    return (function if how == "eager" else tf.function(function, jit_compile=how == "compiled"))(left, right)


@pytest.mark.parametrize("how", ["eager", "graph", "compiled"] if TENSORFLOW else ["compiled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_gradients_against_float64(equation, dtype, how):
    left, right = (rounded(zoo.normal(*shape), dtype) for shape in EQUATIONS[equation])
    weights = rounded(zoo.normal(*np.einsum(equation, left, right).shape), dtype)
    low = [keras.ops.cast(x, dtype) for x in (left, right)]
    actual = gradients(equation, *low, keras.ops.cast(weights, "float32"), how)
    operands, out = equation.split("->")
    labels = operands.split(",")
    expected = (
        np.einsum(f"{out},{labels[1]}->{labels[0]}", weights, right),
        np.einsum(f"{labels[0]},{out}->{labels[1]}", left, weights),
    )
    tolerance = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]  # one rounding of the result to 16 bits
    for a, e in zip(actual, expected, strict=True):
        assert keras.backend.standardize_dtype(a.dtype) == dtype
        a = keras.ops.convert_to_numpy(keras.ops.cast(a, "float32"))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=1e-5)
