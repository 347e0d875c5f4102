import keras
import numpy as np
import pytest
import zoo
from arrays import rounded
from gradients_of import MODES, value_and_gradients

from keras_mp.stability.accumulate import einsum_float32

EQUATIONS = {
    "ab,bc->ac": ((5, 7), (7, 3)),
    "abc,cd->abd": ((2, 5, 7), (7, 3)),
    "btnh,bsnh->bnts": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "aecd,abcd->acbe": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "ab,b->a": ((4, 8), (8,)),
    "abc,cde->abde": ((1, 1, 7), (7, 1, 3)),
}
# Each with one of the two.
DTYPES = dict(zip(EQUATIONS, ("bfloat16", "float16") * 3, strict=True))


@pytest.mark.jax
@pytest.mark.parametrize("equation, dtype", DTYPES.items())
def test_against_float64(equation, dtype):
    left, right = (rounded(zoo.normal(*shape), dtype) for shape in EQUATIONS[equation])
    out = einsum_float32(equation, keras.ops.cast(left, dtype), keras.ops.cast(right, dtype))
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    # Only float32's rounding is left: the same contraction in 16 bits is off by 1e-3 and more.
    np.testing.assert_allclose(keras.ops.convert_to_numpy(out), np.einsum(equation, left, right), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_non_finite_operands_stay_visible(bad):
    left = keras.ops.cast(np.array([[1.0, bad]]), "bfloat16")
    out = keras.ops.convert_to_numpy(einsum_float32("ab,bc->ac", left, keras.ops.cast(np.eye(2), "bfloat16")))
    assert not np.isfinite(out[0, 1])


# The modes take turns.
@pytest.mark.parametrize(
    "equation, mode",
    [
        pytest.param(equation, mode, marks=[pytest.mark.jax] * (mode == "jit"))
        for equation, mode in zip(EQUATIONS, ("jit", MODES[-2], "eager") * 2, strict=True)
    ],
)
def test_gradients_against_float64(equation, mode):
    dtype = DTYPES[equation]
    left, right = (rounded(zoo.normal(*shape), dtype) for shape in EQUATIONS[equation])
    weights = rounded(zoo.normal(*np.einsum(equation, left, right).shape), dtype).astype("float32")

    def function(left, right):
        product = einsum_float32(equation, keras.ops.cast(left, dtype), keras.ops.cast(right, dtype))
        return keras.ops.sum(product * weights)

    # The size of the first axis is not known in a graph, as that of a batch.
    _, *actual = value_and_gradients(function, [left.astype("float32"), right.astype("float32")], mode, unknown=(0,))
    operands, out = equation.split("->")
    labels = operands.split(",")
    expected = (
        np.einsum(f"{out},{labels[1]}->{labels[0]}", weights, right),
        np.einsum(f"{labels[0]},{out}->{labels[1]}", left, weights),
    )
    tolerance = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]  # one rounding of the result to 16 bits
    for ours, exact in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, rounded(ours, dtype))
        np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=1e-5)
