"""INT8 products once more, in NumPy: integers, sums in int64, and the hash of stochastic rounding."""

import zlib

import numpy as np

TOP = 127


def mix(word):
    """Murmur3's finalizer."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return word ^ (word >> 16)


def lowbias32(word):
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return word ^ (word >> 16)


def words(shape, seed, step, variable):
    """The hash of seed, step, variable and place, with Python's integers."""
    first = mix(mix(mix(seed & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF)) ^ mix((variable + 0x9E3779B1) & 0xFFFFFFFF))
    keys = [lowbias32(step ^ first), lowbias32(step ^ mix(first ^ 0x9E3779B1))]
    result = []
    for place in range(int(np.prod(shape))):
        word = (place + keys[0]) & 0xFFFFFFFF
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        word ^= keys[1]
        word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        result.append(word ^ (word >> 16))
    return np.array(result, "uint64").reshape(shape)


def amax(x, axes=None):
    """Infinite or NaN where x is."""
    return np.max(np.abs(np.asarray(x, "float32")), axis=axes, keepdims=axes is not None, initial=0)


def scale_of(magnitude, margin=0):
    """float32, 1 where the magnitude is 0 or not finite."""
    magnitude = np.asarray(magnitude, "float32")
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scale = np.minimum(np.float32(TOP * 2.0**-margin) / magnitude, np.float32(2.0**126))
    return np.where(np.isfinite(magnitude) & (magnitude > 0), scale, np.float32(1))


def integers(x, scale, bits=None):
    """To the nearest, ties to even; with words up or down by their 16 high bits. Exact in float64."""
    scaled = np.clip((np.asarray(x, "float32") * scale).astype("float32"), -TOP, TOP)
    if bits is None:
        return np.round(scaled).astype("int64")
    fraction = (np.float64(bits >> np.uint64(16)) + 0.5) * 2.0**-16
    # Of the sum float32 keeps 24 bits.
    return np.floor((scaled.astype("float64") + fraction).astype("float32")).astype("int64")


def divided(sums, left, right):
    """int64 sums as float32, times the reciprocal of the scales' product, all in float32."""
    assert np.abs(sums).max(initial=0) < 2**31
    return sums.astype("float32") * (np.float32(1) / (np.float32(left) * np.float32(right)))


def variable(path):
    return zlib.crc32(path.encode())
