"""Limits, rounding and scales of the formats, against ml_dtypes and against arithmetic in float64; both casts agree."""

import math

import keras
import ml_dtypes
import numpy as np
import pytest
from arrays import DTYPES, MAX, saturated
from gradients_of import compiled

from keras_mp.fp8 import Scaling
from keras_mp.fp8.quantize import quantize as scaled
from keras_mp.precision.formats import (
    E4M3,
    E5M2,
    FLOAT16,
    FORMATS,
    INT8,
    MAX_SCALE,
    SCALED_FORMATS,
    cast,
    current_scale,
    format_named,
    scale_to,
)

# Subnormals of float32 and of each format, halfway cases, the largest numbers and what lies past them.
DIFFICULT = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e-40, 1e-38, 2.0**-126, 2.0**-133, 2.0**-134, 1.4e-45 * 3),
    *(2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 2.5 * 2.0**-9, 2.0**-16, 2.0**-17, 1.5 * 2.0**-16, 2.0**-24, 2.0**-25),
    *(448, 449, 463.9, 464, 464.1, 480, 57344, 57345, 61439, 61440, 61441, 65504, 65519.99, 65520, 65521, 7e4),
    *(3.3895e38, 3.394e38, 3.4e38, 17, 19, 9, 11, 1.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, -7.250491),
]


def difficult():
    with np.errstate(over="ignore"):
        x = np.array(DIFFICULT, "float32")
    return np.concatenate([x, -x])


def graph(function):
    """The function in TensorFlow's graph mode, whose optimizer simplifies arithmetic by rules of its own."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow alone has graphs without XLA")
    import tensorflow as tf

    return tf.function(function, jit_compile=False, autograph=False)


FLOAT8 = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
# What JAX runs eagerly it compiles, too.
MODES = pytest.mark.parametrize(
    "mode",
    [lambda function: function, pytest.param(compiled, marks=pytest.mark.jax), graph],
    ids=["eager", "jit", "graph without XLA"],
)


def bits(x):
    return keras.ops.convert_to_numpy(x).view(np.uint8)


def every_bfloat16():
    return (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def random_float32(count=2**20):
    rng = np.random.default_rng()
    patterns = rng.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)  # infinities, NaNs, subnormals too
    in_range = rng.normal(size=count // 2) * 2.0 ** rng.uniform(-20, 20, size=count // 2)
    return np.concatenate([patterns, in_range.astype(np.float32)])


def ties_and_neighbours(format):
    """Every midpoint of two numbers of the format, and the float32 on either side of it."""
    numbers = np.sort(np.arange(256, dtype=np.uint8).view(DTYPES[format.name]).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    return np.concatenate([numbers, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])


@FLOAT8
@MODES
def test_cast_is_exact(format, mode):
    function = mode(lambda x: cast(x, format))
    for x in (every_bfloat16(), random_float32(), ties_and_neighbours(format), difficult()):
        expected = saturated(x, format.name)
        actual = keras.ops.convert_to_numpy(function(keras.ops.convert_to_tensor(x)))
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
        assert np.all(np.isfinite(actual.astype(np.float32)) == np.isfinite(x))


@FLOAT8
@MODES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_inputs_are_cast_as_their_float32_values(format, mode, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(getattr(ml_dtypes, dtype, np.float16))
    function = mode(lambda x: cast(keras.ops.cast(x, dtype), format))
    actual = function(keras.ops.convert_to_tensor(x.astype(np.float32)))
    expected = saturated(x.astype(np.float32), format.name)
    finite = np.isfinite(x.astype(np.float32))
    # A compiler may flush float16's subnormals; all of them are below half of what either format can tell from zero.
    np.testing.assert_array_equal(bits(actual)[finite] & 0x7F, expected.view(np.uint8)[finite] & 0x7F)


@FLOAT8
@MODES
def test_every_pattern_comes_back(format, mode):
    patterns = np.arange(256, dtype=np.uint8)
    numbers = patterns.view(DTYPES[format.name]).astype("float32")
    actual = mode(lambda x: cast(x, format))(keras.ops.convert_to_tensor(numbers))
    finite = np.isfinite(numbers)
    # A zero has no sign.
    np.testing.assert_array_equal(bits(actual)[finite], np.where(numbers == 0, 0, patterns)[finite])
    assert np.isnan(keras.ops.convert_to_numpy(actual).astype("float32")[~finite]).all()
    np.testing.assert_array_equal(format.round(numbers), np.where(finite, numbers, np.nan))


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_those_of_ml_dtypes(name):
    format, limits = {**FORMATS, **SCALED_FORMATS}[name], ml_dtypes.finfo(DTYPES[name])
    assert format.dtype == str(np.dtype(DTYPES[name]))
    assert format.max == float(limits.max) == MAX[name]
    assert format.mantissa_bits == limits.nmant
    assert format.min_exponent == limits.minexp
    assert format.saturates == (name in SCALED_FORMATS)


def nearest(x, format):
    """The nearest number of a format in float64, ties to even, of a finite value; also past the largest number."""
    exponent = max(math.frexp(x)[1] - 1, format.min_exponent) if x else format.min_exponent
    step = 2.0 ** (exponent - format.mantissa_bits)
    return round(x / step) * step


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_of_arrays_is_that_of_the_definition(name):
    format = FORMATS[name]
    x = np.concatenate([difficult(), every_bfloat16()[::17], random_float32(2**14)])
    for value, rounded in zip(x.tolist(), format.round(x).tolist(), strict=True):
        if not math.isfinite(value):
            assert math.isnan(rounded) if format.saturates or math.isnan(value) else rounded == value
            continue
        exact = nearest(value, format)
        overflows = abs(exact) > format.max
        assert format.overflows(value) == overflows, value
        if overflows:
            exact = math.copysign(format.max if format.saturates else math.inf, value)
        assert rounded == exact, value


def test_int8_has_a_number_for_what_is_infinite_and_past_its_end():
    x = np.array([np.inf, -np.inf, 1e9, 127.6, -200.0, 2.5], "float32")
    found = keras.ops.convert_to_numpy(cast(keras.ops.convert_to_tensor(x), INT8))
    np.testing.assert_array_equal(found, np.rint(np.clip(x, -127, 127)).astype("int8"))


@FLOAT8
@MODES
def test_the_scale_of_a_magnitude_is_that_of_current_scaling(format, mode):
    """Below some 1e-33 the audit's scale was larger than the one that training uses."""
    scaling = Scaling(format)
    scale_of = mode(lambda x: scaled(x, scaling).scale)
    magnitudes = [0.0, 2.0**-126, 1e-37, 5e-36, 6e-34, 1e-33, 1.0, 448.0, 3.4e38, math.inf]
    magnitudes += (10.0 ** np.random.default_rng().uniform(-37, 38, 100)).tolist()
    for amax in np.array(magnitudes, "float32"):
        expected = np.float32(current_scale(float(amax), format))
        assert float(scale_of(keras.ops.convert_to_tensor(np.array([amax, 0], "float32")))) == expected
    # A compiler may flush float32's subnormals to zero, whose scale is 1.
    for amax in np.array([1e-45, 1e-40], "float32"):
        actual = float(scale_of(keras.ops.convert_to_tensor(np.array([amax, 0], "float32"))))
        assert current_scale(float(amax), format) == MAX_SCALE and actual in (1.0, MAX_SCALE)


@MODES
def test_a_scale_that_is_a_power_of_two_is_the_next_one_below(mode):
    amax = (10.0 ** np.random.default_rng().uniform(-36, 38, 300)).astype("float32")
    amax[:3] = 448.0, 449.0, 224.0
    scale = np.asarray(mode(lambda x: scale_to(448.0, x, power_of_two=True))(keras.ops.convert_to_tensor(amax)))
    assert scale[:3].tolist() == [1.0, 0.5, 2.0]
    exact = np.minimum(np.float32(448.0) / amax, np.float32(MAX_SCALE))
    np.testing.assert_array_equal(scale, np.exp2(np.frexp(exact)[1] - 1.0))


def test_formats_by_name():
    assert format_named("e4m3") is E4M3 and format_named("E5M2") is E5M2 and format_named(E5M2) is E5M2
    assert format_named("FLOAT16") is FLOAT16
    for wrong in ("E3M4", None, 8):
        with pytest.raises(ValueError, match=f"format={wrong!r} must be one of 'float16', 'bfloat16', 'E4M3', 'E5M2'"):
            format_named(wrong)
    for wrong in ("float16", FLOAT16):
        with pytest.raises(ValueError, match="format=.*float16.* must be one of 'E4M3', 'E5M2'"):
            format_named(wrong, {"E4M3": E4M3, "E5M2": E5M2})
