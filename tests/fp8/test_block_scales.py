"""Blocks with a shared scale: every code and scale against ml_dtypes and NumPy, bit for bit."""

import functools

import keras
import mx_reference as reference
import numpy as np
import pytest
from reference import DTYPES, compiled, to_numpy

from keras_mp.fp8.block_scaled import (
    Blocks,
    as_matrix,
    dequantize_rows,
    exponents,
    quantize_matrix,
)
from keras_mp.fp8.scaling import Scaling
from keras_mp.precision.formats import FORMATS

NAMES = ["E4M3", "E5M2"]
SCALES = {"up": "E8M0", "floor": "E8M0_floor"}


def tensor(x, dtype="float32"):
    return keras.ops.convert_to_tensor(np.asarray(x).astype(dtype))


def edges():
    """Magnitudes at every exponent, at and beside the mantissas where a scale changes; zero, subnormals, no numbers."""
    mantissas = np.array([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF, *np.random.default_rng().integers(0, 2**23, 9)])
    bits = (np.arange(256)[:, None] * 2**23 + mantissas).astype("uint32")
    return bits.view("float32").ravel()


@pytest.mark.jax
@pytest.mark.parametrize("rounding", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_scale(name, rounding):
    amax = edges()
    found = compiled(lambda amax: exponents(amax, FORMATS[name], SCALES[rounding]))(tensor(amax))
    found = keras.ops.convert_to_numpy(found)
    np.testing.assert_array_equal(found, reference.exponents(amax, name, rounding))
    if rounding == "up":  # no number saturates
        known = np.isfinite(amax) & (amax > 0)
        amax, scales, top = amax[known].astype("float64"), reference.scale(found[known]), reference.MAX[name]
        assert np.all(amax <= top * scales)
        ordinary = amax > 2.0**-100  # further down the smallest scale serves
        assert np.all(amax[ordinary] > top / 2 * scales[ordinary])


@pytest.mark.jax
@pytest.mark.parametrize("name", NAMES)
def test_every_code_with_every_scale(name):
    """NaN is NaN, and what is no normal float32 may be flushed to zero."""
    codes = np.arange(256, dtype="uint8").view(DTYPES[name])
    scales = np.delete(np.arange(256, dtype="uint8"), 254)  # 2^127: no float32 has a scale of more than 2^120
    values = np.tile(codes, (255, 1))
    operands = (
        keras.ops.cast(tensor(values.astype("float32")), FORMATS[name].dtype),
        tensor(scales[:, None], "uint8"),
    )
    run = compiled(lambda values, bits: dequantize_rows(Blocks(values, keras.ops.repeat(bits, 8, 1))))
    found = to_numpy(run(*operands))
    with np.errstate(over="ignore"):
        exact = (values.astype("float64") * reference.scale(scales)[:, None]).astype("float32").astype("float64")
    normal = ~(np.abs(exact) < 2.0**-126)
    np.testing.assert_array_equal(found[normal], exact[normal])
    assert np.all((found == exact) | (found == 0), where=~normal)


def spread(rows, columns):
    rng = np.random.default_rng()
    return (rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-30, 30, (rows, 1))).astype("float32")


@pytest.mark.jax
@pytest.mark.parametrize(
    "shape, name, rounding, axis, dtype",
    [
        ((5, 33), "E4M3", "up", 0, "float32"),
        ((5, 33), "E5M2", "floor", 1, "float32"),
        ((64, 32), "E4M3", "floor", 0, "float32"),
        ((64, 32), "E5M2", "up", 1, "float32"),
        ((1, 1), "E5M2", "floor", 0, "float32"),
        ((1, 64), "E4M3", "floor", 1, "float32"),
        ((3, 40), "E4M3", "up", 1, "bfloat16"),
        ((3, 40), "E4M3", "up", 1, "float16"),
        ((31, 96), "E5M2", "up", 0, "float32"),
    ],
)
def test_a_matrix_bit_for_bit(shape, name, rounding, axis, dtype):
    x = spread(*shape) if dtype != "float16" else np.random.default_rng().normal(size=shape)
    x[0, 0] = 0
    x = keras.ops.cast(tensor(x), dtype)
    run = functools.partial(quantize_matrix, scaling=Scaling(name, "block", SCALES[rounding]), axis=axis)
    exact = to_numpy(x).astype("float32")
    codes, scales = reference.blocks(exact if axis else exact.T, name, rounding)
    for mode in (compiled,) if keras.backend.backend() == "jax" else (compiled, lambda function: function):
        found = mode(run)(x)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(found.scales), scales)
        np.testing.assert_array_equal(to_numpy(found.values), codes.astype("float64"))


@pytest.mark.jax
@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other(axis):
    def run(x):
        quantized = quantize_matrix(x, Scaling("E4M3", "block", "E8M0"), axis)
        return quantized.values, quantized.scales, dequantize_rows(quantized)

    run = compiled(run)
    for bad in (np.inf, -np.inf, np.nan):
        x = spread(40, 70)
        x[33, 3] = bad
        values, scales, found = run(tensor(x))
        expected = np.zeros(found.shape, bool)
        if axis:
            expected[33, :32] = True
        else:
            expected[3, 32:] = True
        np.testing.assert_array_equal(np.isnan(to_numpy(found)), expected)
        assert (keras.ops.convert_to_numpy(scales) == 255).sum() == 1
        assert np.isnan(to_numpy(values)).any()  # also for who reads the codes alone


@pytest.mark.parametrize("summed", [(0,), (2,), (0, 1), (1, 2), (1,), (2, 0), (0, 2)])
def test_a_matrix_of_a_tensor(summed):
    x = np.random.default_rng().normal(size=(3, 4, 5)).astype("float32")
    matrix, axis = as_matrix(tensor(x), summed)
    kept = [each for each in range(3) if each not in summed]
    rows = np.transpose(x, [*kept, *summed]).reshape(int(np.prod([x.shape[each] for each in kept])), -1)
    np.testing.assert_array_equal(to_numpy(matrix if axis else keras.ops.transpose(matrix)), rows)
