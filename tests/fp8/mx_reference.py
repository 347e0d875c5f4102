"""MX formats once more, in NumPy: scales by exponents in float64, numbers by ml_dtypes."""

import ml_dtypes
import numpy as np
from reference import DTYPES, MAX, along, cast, product

BLOCK = 32
TOP = {"E4M3": 8, "E5M2": 15}  # exponent of the largest number


def exponents(amax, name, rounding):
    """Bits of E8M0 for the largest magnitudes of blocks, by OCP MX 1.0, section 6.3, or rounded up."""
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        amax = np.asarray(amax, "float64")  # in which every number of float32 is normal
    known = np.isfinite(amax) & (amax > 0)
    power = np.frexp(np.where(known, amax, 1))[1] - 1 - TOP[name]
    power += (rounding == "up") & (amax > MAX[name] * 2.0**power)
    return np.select([known, amax == 0], [np.maximum(power + 127, 0), 0], 255).astype("uint8")


def blocks(x, name, rounding="up"):
    """Codes of a matrix whose rows are filled up with zeros, and the bits of the scales."""
    x = np.asarray(x, "float32")
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    parts = x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    amax = np.where(np.isfinite(parts).all(-1), np.abs(parts).max(-1, initial=0), np.inf)
    bits = exponents(amax, name, rounding)
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

    def of_rows(rows):
        codes, bits = blocks(rows, name, rounding)
        return codes.astype("float64") * np.repeat(scale(bits), BLOCK, axis=1)

    return along(of_rows, axes, x)


def mx_product(equation, x, w, names, rounding="up"):
    """Of two tensors that are each quantized along what is summed: as `reference.product`."""
    left, right = equation.split("->")[0].split(",")
    summed = [label for label in left if label in right]
    operands = [
        numbers(each, name, rounding, tuple(labels.index(label) for label in summed))
        for each, name, labels in ((x, names[0], left), (w, names[1], right))
    ]
    return product(equation, (operands[0], 1), (operands[1], 1))
