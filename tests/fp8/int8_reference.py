"""INT8 products once more, in NumPy: integers, and sums in int64."""

import zlib

import numpy as np

TOP = 127


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
