"""The cast is ml_dtypes' of the clipped value, bit for bit."""

import keras
import ml_dtypes
import numpy as np
import pytest
import reference
from reference import DTYPES, compiled

from keras_mp.fp8 import E4M3, E5M2
from keras_mp.fp8.formats import cast, dequantize, format_named, quantize


def graph(function):
    """The function in TensorFlow's graph mode, whose optimizer simplifies arithmetic by rules of its own."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow alone has graphs without XLA")
    import tensorflow as tf

    return tf.function(function, jit_compile=False, autograph=False)


FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
MODES = pytest.mark.parametrize(
    "mode", [lambda function: function, compiled, graph], ids=["eager", "jit", "graph without XLA"]
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


@FORMATS
@MODES
def test_cast_is_exact(format, mode):
    function = mode(lambda x: cast(x, format))
    for x in (every_bfloat16(), random_float32(), ties_and_neighbours(format)):
        expected = reference.cast(x, format.name)
        actual = keras.ops.convert_to_numpy(function(keras.ops.convert_to_tensor(x)))
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
        assert np.all(np.isfinite(actual.astype(np.float32)) == np.isfinite(x))


@FORMATS
@MODES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_inputs_are_cast_as_their_float32_values(format, mode, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(getattr(ml_dtypes, dtype, np.float16))
    function = mode(lambda x: cast(keras.ops.cast(x, dtype), format))
    actual = function(keras.ops.convert_to_tensor(x.astype(np.float32)))
    expected = reference.cast(x.astype(np.float32), format.name)
    finite = np.isfinite(x.astype(np.float32))
    # A compiler may flush float16's subnormals; all of them are below half of what either format can tell from zero.
    np.testing.assert_array_equal(bits(actual)[finite] & 0x7F, expected.view(np.uint8)[finite] & 0x7F)


@pytest.mark.parametrize(
    "format, x, expected",
    [
        (E4M3, 449.0, 448.0),
        (E4M3, -1e30, -448.0),
        (E4M3, 65504.0, 448.0),
        (E4M3, np.inf, np.nan),
        (E4M3, -np.inf, np.nan),
        (E4M3, np.nan, np.nan),
        (E4M3, 2.0**-9, 2.0**-9),
        (E4M3, 2.0**-10, 0.0),
        (E4M3, 1.5 * 2.0**-9, 2.0**-8),
        (E4M3, 17.0, 16.0),
        (E4M3, 19.0, 20.0),
        (E5M2, 65504.0, 57344.0),
        (E5M2, np.inf, np.nan),
        (E5M2, -np.inf, np.nan),
        (E5M2, 2.0**-16, 2.0**-16),
        (E5M2, 2.0**-17, 0.0),
        (E5M2, 9.0, 8.0),
        (E5M2, 11.0, 12.0),
        # Through float16 it would be rounded to a tie, and then to -7.
        (E4M3, -7.250491, -7.5),
    ],
)
@MODES
def test_cast_by_hand(format, x, expected, mode):
    actual = mode(lambda x: cast(x, format))(keras.ops.convert_to_tensor(np.float32([x])))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(actual).astype(np.float32), np.float32([expected]))


@FORMATS
def test_limits_are_those_of_ml_dtypes(format):
    limits = ml_dtypes.finfo(DTYPES[format.name])
    assert format.dtype == str(np.dtype(DTYPES[format.name]))
    assert format.max == float(limits.max)
    assert format.mantissa_bits == limits.nmant
    assert format.min_exponent == limits.minexp
    assert format.smallest == float(limits.smallest_subnormal)


@FORMATS
def test_dequantize_undoes_quantize_up_to_half_a_step(format):
    x = np.random.default_rng().uniform(1, 2, 1000).astype(np.float32)
    scale = np.float32(100.0)
    back = dequantize(quantize(keras.ops.convert_to_tensor(x), format, scale), scale)
    # Half of the last bit, and float32's rounding of the two multiplications.
    bound = 2.0 ** -(format.mantissa_bits + 1) * (1 + 1e-6)
    assert np.max(np.abs(keras.ops.convert_to_numpy(back) / x - 1)) <= bound


@FORMATS
@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1, 1), (2, 3, 4, 5)])
def test_any_shape(format, shape):
    x = np.random.default_rng().normal(size=shape).astype(np.float32)
    actual = keras.ops.cast(cast(keras.ops.convert_to_tensor(x), format), "float32")
    np.testing.assert_array_equal(np.asarray(actual), reference.cast(x, format.name).astype(np.float32))


def test_formats_by_name():
    assert format_named("e4m3") is E4M3 and format_named("E5M2") is E5M2 and format_named(E5M2) is E5M2
    for wrong in ("E3M4", None, 8):
        with pytest.raises(ValueError, match=f"format={wrong!r} is no 8-bit .* use 'E4M3' or 'E5M2'"):
            format_named(wrong)
