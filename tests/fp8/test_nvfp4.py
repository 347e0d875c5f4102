"""NVFP4: every code and scale against NumPy, the transform, stochastic rounding, and the products."""

import functools

import keras
import ml_dtypes
import numpy as np
import nv_reference as reference
import pytest
from hashed import words
from reference import assert_close, compiled, tensors, to_numpy, with_gradients

from keras_mp.fp8 import Scaling, matmul
from keras_mp.fp8.block_scaled import (
    block_scales,
    dequantize_rows,
    hadamard,
    hadamard_signs,
    quantize_matrix,
    quantize_tiles,
    rows_of_tiles,
    tensor_scale,
)
from keras_mp.precision.formats import SCALED_FORMATS, cast

PLAIN = Scaling("E2M1", "block", "E4M3")
MIXED = Scaling("E2M1", "block", "E4M3", transform="hadamard")
STOCHASTIC = Scaling("E2M1", "block", "E4M3", rounding="stochastic")
TILES = Scaling("E2M1", "tile", "E4M3")
SIGNS = hadamard_signs(0)


def spread(rows, columns, powers=12):
    """Rows and columns that differ by orders, a row of zeros, and zeros in others."""
    rng = np.random.default_rng()
    x = rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-powers, powers, (rows, 1))
    x = x * 2.0 ** rng.integers(-3, 3, (1, columns))
    x[rng.random((rows, columns)) < 0.1] = 0
    x[rows // 2] *= rows < 2
    return x.astype("float32")


@pytest.mark.jax
def test_the_scale_of_every_magnitude():
    """At all exponents, and at and beside the mantissas where E4M3 rounds another way."""
    mantissas = np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0x17FFFF, 0x180000, 0x180001, 0x7FFFFF])
    amax = ((np.arange(1, 255)[:, None] * 2**23) + mantissas).astype("uint32").view("float32").ravel()
    run = compiled(lambda amax, of_tensor: block_scales(amax, of_tensor))
    for top in (np.float32(1.0), np.float32(3e38), np.float32(2.0**-126), *np.exp2(np.random.uniform(-99, 99, 3))):
        own = amax[amax <= top]
        of_tensor = reference.tensor_scale(np.float32(top))
        expected = reference.block_scales(own, of_tensor)
        found = run(*tensors(np.pad(own, (0, amax.size - own.size)), float(of_tensor)))
        np.testing.assert_array_equal(to_numpy(found)[: own.size], expected)
        assert float(tensor_scale(*tensors(own))) == float(reference.tensor_scale(own))
    np.testing.assert_array_equal(np.isnan(to_numpy(run(*tensors([np.inf, np.nan, 0.0], 1.0)))), [True, True, False])


@pytest.mark.jax
@pytest.mark.parametrize(
    "shape, axis, dtype, scaling",
    [
        ((5, 33), 0, "float32", PLAIN),
        ((16, 48), 1, "float32", PLAIN),
        ((1, 1), 1, "float32", PLAIN),
        ((7, 20), 1, "bfloat16", PLAIN),
        ((33, 7), 0, "float32", STOCHASTIC),
        ((6, 40), 1, "float32", MIXED),
        ((40, 6), 0, "float32", MIXED),
    ],
    ids=str,
)
def test_a_matrix_bit_for_bit(shape, axis, dtype, scaling):
    x = keras.ops.cast(*tensors(spread(*shape)), dtype)
    bits = words(shape, 3, 5, 7).astype("uint32")
    drawn = keras.ops.convert_to_tensor(bits) if scaling is STOCHASTIC else None
    found = compiled(functools.partial(quantize_matrix, scaling=scaling, axis=axis))(x, bits=drawn)
    exact = to_numpy(x).astype("float32")
    codes, scales, of_tensor = reference.blocks(
        exact if axis else exact.T,
        None if drawn is None else (bits if axis else bits.T),
        SIGNS if scaling is MIXED else None,
    )
    np.testing.assert_array_equal(to_numpy(found.scales), scales)
    np.testing.assert_array_equal(to_numpy(found.values), codes)
    assert float(found.factor) == np.float32(1) / of_tensor
    numbers = to_numpy(dequantize_rows(found))
    np.testing.assert_array_equal(numbers, codes * np.repeat(scales, 16, axis=1))
    np.testing.assert_array_equal(to_numpy(keras.ops.cast(numbers, "bfloat16")), numbers)  # which products rely on


@pytest.mark.jax
@pytest.mark.parametrize("shape", [(5, 33), (32, 16), (1, 1)])
def test_tiles_bit_for_bit_and_both_directions_read_the_same(shape):
    x = spread(*shape)
    found = compiled(lambda x: quantize_tiles(x, TILES))(*tensors(x))
    codes, scales, _ = reference.tiles(x)
    np.testing.assert_array_equal(to_numpy(found.values), codes)
    np.testing.assert_array_equal(to_numpy(found.scales), scales)
    rows, columns = (
        to_numpy(dequantize_rows(rows_of_tiles(found, axis, count))) for axis, count in ((1, shape[0]), (0, shape[1]))
    )
    np.testing.assert_array_equal(rows[:, : shape[1]], columns[:, : shape[0]].T)
    np.testing.assert_array_equal(rows, (codes * np.kron(scales, np.ones((16, 16))))[: shape[0]])


@pytest.mark.jax
@pytest.mark.parametrize("axis", [0, 1])
def test_the_transform(axis):
    matrix = to_numpy(hadamard(*tensors(np.eye(16)), axis, 0))
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))  # entries are +-1/4: nothing is rounded
    assert set(np.unique(matrix)) == {-0.25, 0.25} and len(set(SIGNS)) == 2 and SIGNS != hadamard_signs(1)
    x = np.random.default_rng().integers(-64, 65, (48, 32)).astype("float32")
    moved = to_numpy(hadamard(*tensors(x if axis else x.T), axis, 0))
    expected = (x.reshape(48, 2, 16) @ (matrix if axis else matrix.T)).reshape(48, 32)
    np.testing.assert_array_equal(moved if axis else moved.T, expected)
    back = (expected.reshape(48, 2, 16) @ (matrix.T if axis else matrix)).reshape(48, 32)
    np.testing.assert_array_equal(back, x)


@pytest.mark.jax
@pytest.mark.parametrize("name", SCALED_FORMATS)
def test_stochastic_rounding_is_exact_in_the_mean_between_all_neighbours(name):
    """Over all words, at sixteenths of the distance; only one of the two neighbours is drawn."""
    format = SCALED_FORMATS[name]
    if name == "INT8":
        numbers = np.arange(-127, 128, dtype="float32")
    else:
        dtype = np.dtype(getattr(ml_dtypes, format.dtype))
        numbers = np.arange(2 ** (4 if name == "E2M1" else 8), dtype="uint8").view(dtype).astype("float32")
        numbers = np.unique(numbers[np.isfinite(numbers)])
    low, high = numbers[:-1], numbers[1:]
    parts = np.random.default_rng().integers(0, 16, len(low))
    x = (low + (high - low) * parts / 16).astype("float32")
    bits = (np.arange(2**16, dtype="uint32") << 16)[:, None]
    counted = np.zeros(len(low))
    run = compiled(lambda x, bits: keras.ops.cast(cast(x, format, bits), "float32"))
    for start in range(0, 2**16, 2**13):
        chosen = bits[start : start + 2**13] + np.zeros((1, len(x)), "uint32")
        drawn = to_numpy(run(*tensors(np.broadcast_to(x, chosen.shape)), keras.ops.convert_to_tensor(chosen)))
        assert np.all((drawn == low) | (drawn == high))
        counted += (drawn == high).sum(axis=0)
    np.testing.assert_array_equal(counted, parts * 2**12)


@pytest.mark.jax
@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("abcd,dce->abe", (3, 5, 2, 20), (20, 2, 16)),  # a kernel whose axes lie in another order
    ],
)
def test_any_product(equation, x, w):
    rng = np.random.default_rng()
    x, w = (rng.normal(size=shape).astype("float32") for shape in (x, w))
    g = rng.normal(size=np.einsum(equation, x, w).shape).astype("float32")
    run = compiled(with_gradients(lambda x, w: matmul(x, w, "nvfp4", equation=equation, path="a/b")))
    found = run(*tensors(x, w, g))
    for actual, (exact, bound) in zip(found, reference.nv_products(equation, x, w, g, SIGNS, "a/b"), strict=True):
        assert_close(actual, (exact, 2 * bound))  # the tensors' own factors are rounded, too
