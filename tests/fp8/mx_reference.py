"""MX formats once more, in NumPy: scales by exact arithmetic on Python's fractions, numbers by ml_dtypes."""

import functools
from fractions import Fraction

import ml_dtypes
import numpy as np
from reference import DTYPES, MAX, cast, product

BLOCK = 32
TOP = {"E4M3": 8, "E5M2": 15}  # exponent of the largest number


@functools.cache
def exponent(amax, name, rounding):
    """Bits of E8M0 for the largest magnitude of a block, by OCP MX 1.0, section 6.3, or rounded up."""
    if not np.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    number = Fraction(float(amax))
    power = number.numerator.bit_length() - number.denominator.bit_length()
    power -= Fraction(2) ** power > number  # floor(log2)
    power -= TOP[name]
    if rounding == "up" and number > Fraction(MAX[name]) * Fraction(2) ** power:
        power += 1
    return max(power + 127, 0)


def blocks(x, name, rounding="up"):
    """Codes of a matrix whose rows are filled up with zeros, and the bits of the scales."""
    x = np.asarray(x, "float32")
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    parts = x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    amax = np.where(np.isfinite(parts).all(-1), np.abs(parts).max(-1, initial=0), np.inf)
    bits = np.array([exponent(each, name, rounding) for each in amax.ravel().tolist()], "uint8").reshape(amax.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = cast((parts.astype("float64") / scale(bits)[..., None]).astype("float32"), name)
    # A block with a NaN has one wherever it is read.
    codes = np.where((bits == 255)[..., None], np.float32(np.nan).astype(DTYPES[name]), codes)
    return codes.reshape(x.shape), bits


def scale(bits):
    """The numbers of E8M0, in float64."""
    return np.asarray(bits, "uint8").view(ml_dtypes.float8_e8m0fnu).astype("float64")


def numbers(x, name, rounding, axes):
    """A tensor after it was quantized along some axes, in float64."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    order = [*kept, *axes]
    moved = np.transpose(x, order)
    columns = int(np.prod([x.shape[axis] for axis in axes]))
    codes, bits = blocks(moved.reshape([int(np.prod([x.shape[axis] for axis in kept])), columns]), name, rounding)
    values = codes.astype("float64") * np.repeat(scale(bits), BLOCK, axis=1)
    return np.transpose(values[:, :columns].reshape(moved.shape), np.argsort(order))


def mx_product(equation, x, w, names, rounding="up"):
    """Of two tensors that are each quantized along what is summed: as `reference.product`."""
    left, right = equation.split("->")[0].split(",")
    summed = [label for label in left if label in right]
    operands = [
        numbers(each, name, rounding, tuple(labels.index(label) for label in summed))
        for each, name, labels in ((x, names[0], left), (w, names[1], right))
    ]
    return product(equation, (operands[0], 1), (operands[1], 1))
