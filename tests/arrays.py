"""What variables and tensors of either backend hold, in NumPy; the formats of few bits there."""

import keras
import ml_dtypes
import numpy as np
from keras import ops

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
MAX = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127, "E4M3": 448.0, "E5M2": 57344.0, "E2M1": 6.0}


def numpy(x):
    """Floating-point numbers are in float32, as NumPy has no bfloat16; other numbers, as of seeds, are kept."""
    return ops.convert_to_numpy(ops.cast(x, "float32") if keras.backend.is_float_dtype(x.dtype) else x)


def values(variables):
    return [numpy(variable) for variable in variables]


def rounded(x, dtype):
    """In float64, as a dtype of 16 bits holds it."""
    return numpy(ops.cast(ops.cast(x, "float32"), dtype)).astype("float64")


def saturated(x, name):
    """Clips what is finite, and rounds as ml_dtypes does; the rest is NaN."""
    x = np.asarray(x, "float32")
    clipped = np.where(np.isfinite(x), np.clip(x, -MAX[name], MAX[name]), np.nan).astype("float32")
    with np.errstate(invalid="ignore"):
        return clipped.astype(DTYPES[name])
