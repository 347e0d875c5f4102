"""What variables and tensors of either backend hold, in NumPy."""

import keras
from keras import ops


def numpy(x):
    """Floating-point numbers are in float32, as NumPy has no bfloat16; other numbers, as of seeds, are kept."""
    return ops.convert_to_numpy(ops.cast(x, "float32") if keras.backend.is_float_dtype(x.dtype) else x)


def values(variables):
    return [numpy(variable) for variable in variables]


def rounded(x, dtype):
    """In float64, as a dtype of 16 bits holds it."""
    return numpy(ops.cast(ops.cast(x, "float32"), dtype)).astype("float64")
