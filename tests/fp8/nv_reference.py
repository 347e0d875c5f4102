"""NVFP4 once more, in NumPy: every operation on Python's fractions and rounded once, numbers of E2M1 by ml_dtypes."""

from fractions import Fraction

import int8_reference
import ml_dtypes
import numpy as np
from hashed import words
from reference import product

SIZE = 16
FLOAT32 = (23, -126)
E4M3 = (3, -6)


def rounded(number, format):
    """To the nearest number of so many bits of mantissa and least exponent, ties to even; without a largest one."""
    bits, least = format
    if number == 0:
        return Fraction(0)
    power = number.numerator.bit_length() - number.denominator.bit_length()
    power -= Fraction(2) ** power > number  # floor(log2)
    step = Fraction(2) ** (max(power, least) - bits)
    return round(number / step) * step  # Python rounds ties to even


def tensor_scale(x):
    amax = np.max(np.abs(x), initial=0)
    if amax == 0 or not np.isfinite(amax):
        return Fraction(1)
    return min(rounded(Fraction(2688) / Fraction(float(amax)), FLOAT32), Fraction(2) ** 110)


def block_scale(amax, of_tensor):
    """Of a finite magnitude."""
    sixth = rounded(of_tensor * Fraction(float(np.float32(1 / 6))), FLOAT32)
    scaled = rounded(Fraction(float(amax)) * sixth, FLOAT32)
    return min(rounded(max(scaled, Fraction(2) ** -9), E4M3), Fraction(448))


def code(x, inverse, word=None):
    """One number: to the nearest by ml_dtypes, or by the 16 high bits of a word."""
    scaled = rounded(abs(Fraction(float(x))) * inverse, FLOAT32) * (1 if x >= 0 else -1)
    scaled = float(min(max(scaled, Fraction(-6)), Fraction(6)))
    if word is None:
        return float(np.float32(scaled).astype(ml_dtypes.float4_e2m1fn))
    step = max(2.0 ** np.floor(np.log2(abs(scaled) or 1)), 1.0) / 2
    fraction = ((int(word) >> 16) + 0.5) * 2.0**-16
    return float(np.floor(np.float32(scaled / step + fraction)) * step)  # of the sum float32 keeps 24 bits


def quantize(x, scales, of_tensor, words=None):
    """Codes of an array whose numbers have these scales, one each."""
    inverses = {scale: rounded(of_tensor / scale, FLOAT32) for scale in set(scales.ravel().tolist())}
    words = np.full(x.shape, None) if words is None else words
    codes = [
        code(number, inverses[scale], word)
        for number, scale, word in zip(x.ravel().tolist(), scales.ravel().tolist(), words.ravel().tolist(), strict=True)
    ]
    return np.array(codes).reshape(x.shape)


def padded(x, axes=(1,)):
    return np.pad(x, [(0, -size % SIZE if axis in axes else 0) for axis, size in enumerate(x.shape)])


def blocks(x, words=None, transform=None):
    """Codes of a matrix whose rows are filled up with zeros, its scales as fractions, and the tensor's scale."""
    x = padded(np.asarray(x, "float32"))
    words = None if words is None else padded(words)
    if transform is not None:
        x = hadamard(x, transform)
    of_tensor = tensor_scale(x)
    amax = np.abs(x.reshape(len(x), -1, SIZE)).max(-1, initial=0)
    scales = np.array([block_scale(each, of_tensor) for each in amax.ravel()], object).reshape(amax.shape)
    return quantize(x, np.repeat(scales, SIZE, axis=1), of_tensor, words), scales, of_tensor


def tiles(x):
    """Codes of a matrix filled up with zeros, the scales of its tiles, and the tensor's."""
    x = padded(np.asarray(x, "float32"), (0, 1))
    of_tensor = tensor_scale(x)
    amax = np.abs(x.reshape(x.shape[0] // SIZE, SIZE, x.shape[1] // SIZE, SIZE)).max((1, 3), initial=0)
    scales = np.array([block_scale(each, of_tensor) for each in amax.ravel()], object).reshape(amax.shape)
    every = np.repeat(np.repeat(scales, SIZE, axis=0), SIZE, axis=1)
    return quantize(x, every, of_tensor), scales, of_tensor


def hadamard(x, signs):
    """Each 16 numbers of a row: signs, four rounds of sums and differences in float32, a quarter."""
    x = x.reshape(len(x), -1, SIZE) * np.float32(signs)
    for half in (8, 4, 2, 1):
        pairs = x.reshape(*x.shape[:2], -1, 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        x = x.reshape(len(x), -1, SIZE)
    return (x * np.float32(0.25)).reshape(len(x), -1)


def values(codes, scales, of_tensor):
    """The numbers, in float64."""
    return codes * np.repeat(scales.astype("float64"), SIZE, axis=1) / float(of_tensor)


def words_of(g, path):
    return words(g.shape, 0, 0, int8_reference.variable(path))


def nv_products(equation, x, w, g, signs, path=""):
    """Result and both gradients as pairs, of the exact value and its float32 bound, as `reference.product` has them."""
    operands, out = equation.split("->")
    left, right = operands.split(",")

    def matrix(tensor, labels, summed):
        kept = [label for label in labels if label not in summed]
        order = [labels.index(label) for label in (*kept, *summed)]
        moved = np.transpose(tensor, order)
        return moved, moved.reshape(int(np.prod([tensor.shape[labels.index(label)] for label in kept])), -1)

    def back(numbers, moved, labels, summed):
        kept = [label for label in labels if label not in summed]
        order = [labels.index(label) for label in (*kept, *summed)]
        columns = int(np.prod(moved.shape[len(kept) :]))
        return np.transpose(numbers[:, :columns].reshape(moved.shape), np.argsort(order))

    def by_block(tensor, labels, summed, stochastic=False, transform=None):
        moved, rows = matrix(tensor, labels, summed)
        words = matrix(words_of(tensor, path), labels, summed)[1] if stochastic else None
        return back(values(*blocks(rows, words, transform)), moved, labels, summed)

    forward = [label for label in left if label in right]
    moved, rows = matrix(w, right, forward)
    codes, scales, of_tensor = tiles(rows)
    numbers = (codes * np.repeat(np.repeat(scales.astype("float64"), SIZE, 0), SIZE, 1) / float(of_tensor))[: len(rows)]
    kernel = back(numbers, moved, right, forward)
    to_x = [label for label in right if label not in forward]
    to_w = [label for label in left if label in out]
    # The transform's product is that of the transformed matrices, so it is taken of them.
    xm, gm = (
        values(*blocks(matrix(tensor, labels, to_w)[1], words, signs))
        for tensor, labels, words in ((x, left, None), (g, out, matrix(words_of(g, path), out, to_w)[1]))
    )
    kept = [label for label in left if label not in to_w], [label for label in out if label not in to_w]
    exact, bound = product("ab,cb->ac", (xm, 1), (gm, 1))
    sizes = dict(zip(left + right, x.shape + w.shape, strict=True))
    shape, order = [sizes[label] for label in kept[0] + kept[1]], [(kept[0] + kept[1]).index(label) for label in right]
    return (
        product(equation, (by_block(x, left, forward), 1), (kernel, 1)),
        product(f"{out},{right}->{left}", (by_block(g, out, to_x, stochastic=True), 1), (kernel, 1)),
        tuple(np.transpose(each.reshape(shape), order) for each in (exact, bound)),
    )
