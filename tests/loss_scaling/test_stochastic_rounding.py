"""Rounding to bfloat16 and E4M3 that is right in the mean, beside ml_dtypes and a reference in NumPy."""

import keras
import ml_dtypes
import numpy as np
import pytest
from gradients_of import compiled
from hashed import words
from keras import ops

from keras_mp.optimizer.stochastic_rounding import random_bits, round_to_bfloat16, round_to_float8

pytestmark = pytest.mark.jax  # its compiler has other ways with subnormals and NaNs
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
FORMATS = {BFLOAT16: (round_to_bfloat16, 65536), E4M3: (round_to_float8, 256)}
LARGEST = {BFLOAT16: float(ml_dtypes.finfo(BFLOAT16).max), E4M3: 448.0}


def every(dtype):
    """Every value of a format, as the format has it."""
    word = {1: np.uint8, 2: np.uint16}[np.dtype(dtype).itemsize]
    return np.arange(FORMATS[dtype][1], dtype=word).view(dtype)


def rounded(dtype, x, bits):
    """The library's rounding, as float64; jitted on JAX, where each operation is compiled anyway."""
    function = FORMATS[dtype][0] if keras.backend.backend() == "tensorflow" else compiled(FORMATS[dtype][0])
    result = function(ops.convert_to_tensor(x.astype("float32")), ops.convert_to_tensor(bits))
    assert backend_name(result.dtype) == np.dtype(dtype).name
    return ops.convert_to_numpy(ops.cast(result, "float32")).astype("float64")


def backend_name(dtype):
    return keras.backend.standardize_dtype(dtype)


def neighbours(dtype, x):
    """Of each value the largest one of the format that is not above it, and the next one."""
    with np.errstate(invalid="ignore"):
        values = every(dtype).astype("float64")
    values = np.unique(values[np.isfinite(values)])
    place = np.searchsorted(values, x, side="right") - 1
    return values[place], values[np.minimum(place + 1, len(values) - 1)]


def some_values(dtype, rng, count=256):
    """Values of every size that a format has, subnormals too, with 16 bits for rounding to decide over."""
    lowest = -120 if dtype is BFLOAT16 else -14
    size = rng.uniform(lowest, np.log2(LARGEST[dtype]) - 0.01, count)
    x = (rng.choice([-1, 1], count) * 2**size).astype("float32")
    if dtype is BFLOAT16:
        return x
    # E4M3 has 20 bits less than float32: with the last four zero, and small ones as multiples, 16 are left.
    lower, upper = neighbours(dtype, x.astype("float64"))
    step = (upper - lower) / 65536
    return (lower + np.floor((x - lower) / step) * step).astype("float32")


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: np.dtype(dtype).name)
def test_what_a_format_holds_stays(dtype):
    values = every(dtype)
    bits = np.random.default_rng().integers(0, 2**32, values.shape, dtype=np.uint32)
    x = values.astype("float32")
    for word in (bits, np.zeros_like(bits), ~np.zeros_like(bits)):
        result = rounded(dtype, x, word).astype("float32")
        same = np.where(np.isnan(x), np.isnan(result), result.view(np.uint32) == x.view(np.uint32))
        assert same.all(), x[~same]  # as bits: zero with its sign


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: np.dtype(dtype).name)
def test_the_mean_over_all_bits_is_the_value(dtype):
    x = some_values(dtype, np.random.default_rng())
    place = 16 if dtype is E4M3 else 0
    total = np.zeros(x.shape)
    round_all = _jitted(FORMATS[dtype][0])
    for start in range(0, 65536, 4096):
        words = np.arange(start, start + 4096, dtype=np.uint32)[:, None] << np.uint32(4 if place else 0)
        tiled = np.broadcast_to(x, (4096, x.size))
        total += ops.convert_to_numpy(round_all(tiled, np.broadcast_to(words, tiled.shape))).astype("float64").sum(0)
    np.testing.assert_array_equal(total / 65536, x.astype("float64"))


def _jitted(function):
    def call(x, words):
        return ops.cast(function(ops.convert_to_tensor(x), ops.convert_to_tensor(words)), "float32")

    return compiled(call)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: np.dtype(dtype).name)
def test_the_odds_are_those_of_the_reference(dtype):
    # Independent: the neighbours from the table of all values, the odds in float64.
    rng = np.random.default_rng()
    x = rng.uniform(-1, 1, 2**16).astype("float32") * 2 ** rng.uniform(-12, 8, 2**16).astype("float32")
    words = rng.integers(0, 2**32, x.shape, dtype=np.uint32)
    drawn = (words & (0xFFFF if dtype is BFLOAT16 else 0xFFFFF)) / (2**16 if dtype is BFLOAT16 else 2**20)
    magnitude = np.abs(x.astype("float64"))
    lower, upper = neighbours(dtype, magnitude)
    odds = (magnitude - lower) / np.where(upper > lower, upper - lower, 1)
    if dtype is E4M3:
        odds = np.floor(odds * 2**20) / 2**20  # of a value below 2**-6 the rest is cut
    expected = np.where(drawn + odds >= 1, upper, lower) * np.sign(x)
    np.testing.assert_array_equal(rounded(dtype, x, words), expected)


def test_beyond_the_largest():
    words = np.random.default_rng().integers(0, 2**32, 1000, dtype=np.uint32)
    huge = np.full(1000, np.finfo("float32").max)
    assert set(rounded(BFLOAT16, huge, words)) == {LARGEST[BFLOAT16]}
    assert set(rounded(BFLOAT16, -huge, words)) == {-LARGEST[BFLOAT16]}
    assert set(rounded(E4M3, huge, words)) == {448.0}
    assert set(rounded(E4M3, np.full(1000, -448.001), words)) == {-448.0}
    assert np.isnan(rounded(E4M3, np.full(1000, np.inf), words)).all()
    for quiet_and_not in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF):
        nan = np.full(1000, quiet_and_not, np.uint32).view("float32")
        assert np.isnan(rounded(BFLOAT16, nan, words)).all() and np.isnan(rounded(E4M3, nan, words)).all()


def test_words_are_those_of_the_hash():
    # Pinned: a resumed run of a later version draws the same.
    seed, step, index, shape = 2**40 + 7, 123456, 3, (3, 5, 2)
    expected = words(shape, seed, step, index).flatten().tolist()
    for found in (random_bits(shape, seed, step, index), compiled(lambda n: random_bits(shape, seed, n, index))(step)):
        assert ops.convert_to_numpy(found).flatten().tolist() == expected
    assert ops.convert_to_numpy(random_bits((), seed, step, index)) == expected[0]


def uniform(shape, *arguments):
    """The 16 low bits, those that decide over bfloat16, as numbers of mean 0 and variance 1."""
    low = ops.convert_to_numpy(random_bits(shape, *arguments)) & 0xFFFF
    return (low - 32767.5) / 65536 * np.sqrt(12)


def test_words_are_uniform_and_uncorrelated():
    seed = int(np.random.default_rng().integers(2**63))
    shape, count = (1024, 1024), 2**20
    words = ops.convert_to_numpy(random_bits(shape, seed, 5, 1)).flatten()
    for bit in range(32):  # each is 1 half of the time, within 6 standard deviations
        assert abs((words >> bit & 1).mean() - 0.5) < 6 * 0.5 / np.sqrt(count), bit
    counts = np.bincount(words & 0xFFFF, minlength=65536)  # 16 of each: chi squared with 65,535 degrees of freedom
    assert abs(((counts - 16) ** 2 / 16).sum() - 65535) < 6 * np.sqrt(2 * 65535)

    one = uniform(shape, seed, 5, 1)
    pairs = {f"{lag} on": (one.flatten()[lag:], one.flatten()[:-lag]) for lag in (1, 2, 3, 8, 128, 1024, 4096)}
    pairs |= {f"{later} later": (one, uniform(shape, seed, 5 + later, 1)) for later in (1, 2, 4, 16)}
    pairs |= {f"variable {other}": (one, uniform(shape, seed, 5, other)) for other in (0, 2, 3)}
    pairs |= {f"seed {other}": (one, uniform(shape, seed ^ other, 5, 1)) for other in (1, 2, 2**32)}
    for pair, (a, b) in pairs.items():
        assert abs(np.mean(a * b)) < 6 / np.sqrt(a.size), pair
