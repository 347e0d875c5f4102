"""NVFP4 once more, in NumPy: each operation in float32, numbers of E4M3 and E2M1 by ml_dtypes."""

import int8_reference
import ml_dtypes
import numpy as np
from hashed import words
from reference import along, as_rows, product

SIZE = 16


def tensor_scale(x):
    amax = np.max(np.abs(np.asarray(x, "float32")), initial=0)
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(2688) / amax, np.float32(2.0**110))


def block_scales(amax, of_tensor):
    """Of finite magnitudes, in float64."""
    scaled = np.asarray(amax, "float32") * (of_tensor * np.float32(1 / 6))
    return np.clip(scaled, np.float32(2.0**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype("float64")


def quantize(x, scales, of_tensor, words=None):
    """Codes of an array whose numbers have these scales: to the nearest, or by the 16 high bits of words."""
    with np.errstate(over="ignore"):
        scaled = np.clip(x * (of_tensor / scales.astype("float32")), -6, 6)
    if words is None:
        return scaled.astype(ml_dtypes.float4_e2m1fn).astype("float64")
    step = np.select([np.abs(scaled) < 2, np.abs(scaled) < 4], [0.5, 1.0], 2.0)
    fraction = (np.float64(words.astype("uint64") >> np.uint64(16)) + 0.5) * 2.0**-16
    return np.floor((scaled / step + fraction).astype("float32")) * step  # of the sum float32 keeps 24 bits


def padded(x, axes=(1,)):
    return np.pad(x, [(0, -size % SIZE if axis in axes else 0) for axis, size in enumerate(x.shape)])


def blocks(x, words=None, transform=None):
    """Codes of a matrix whose rows are filled up with zeros, its scales, and the tensor's."""
    x = padded(np.asarray(x, "float32"))
    words = None if words is None else padded(words)
    if transform is not None:
        x = hadamard(x, transform)
    of_tensor = tensor_scale(x)
    scales = block_scales(np.abs(x.reshape(len(x), -1, SIZE)).max(-1, initial=0), of_tensor)
    return quantize(x, np.repeat(scales, SIZE, axis=1), of_tensor, words), scales, of_tensor


def tiles(x):
    """Codes of a matrix filled up with zeros, the scales of its tiles, and the tensor's."""
    x = padded(np.asarray(x, "float32"), (0, 1))
    of_tensor = tensor_scale(x)
    amax = np.abs(x.reshape(x.shape[0] // SIZE, SIZE, x.shape[1] // SIZE, SIZE)).max((1, 3), initial=0)
    scales = block_scales(amax, of_tensor)
    return quantize(x, np.kron(scales, np.ones((SIZE, SIZE))), of_tensor), scales, of_tensor


def hadamard(x, signs):
    """Each 16 numbers of a row: signs, four rounds of sums and differences in float32, a quarter."""
    x = x.reshape(len(x), -1, SIZE) * np.float32(signs)
    for half in (8, 4, 2, 1):
        pairs = x.reshape(*x.shape[:2], -1, 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        x = x.reshape(len(x), -1, SIZE)
    return (x * np.float32(0.25)).reshape(len(x), -1)


def numbers(*arguments):
    """What the blocks of a matrix stand for, in float64."""
    codes, scales, of_tensor = blocks(*arguments)
    return codes * np.repeat(scales, SIZE, axis=1) / np.float64(of_tensor)


def numbers_of_tiles(x):
    codes, scales, of_tensor = tiles(x)
    return (codes * np.kron(scales, np.ones((SIZE, SIZE))) / np.float64(of_tensor))[: len(x)]


def nv_products(equation, x, w, g, signs, path=""):
    """Result and both gradients as pairs, of the exact value and its float32 bound, as `reference.product` has them."""
    operands, out = equation.split("->")
    left, right = operands.split(",")
    drawn = words(g.shape, 0, 0, int8_reference.variable(path))
    forward, to_w = ([label for label in left if label in other] for other in (right, out))
    to_x = [label for label in right if label not in forward]
    kernel = along(numbers_of_tiles, [right.index(label) for label in forward], w)
    inputs = along(numbers, [left.index(label) for label in forward], x)
    upstream = along(numbers, [out.index(label) for label in to_x], g, drawn)
    # The transform's product is that of the transformed matrices, so it is taken of them.
    rows = as_rows(x, [left.index(label) for label in to_w])
    columns = (as_rows(tensor, [out.index(label) for label in to_w]) for tensor in (g, drawn))
    exact, bound = product("ab,cb->ac", (numbers(rows, None, signs), 1), (numbers(*columns, signs), 1))
    kept = [label for label in left if label not in to_w] + [label for label in out if label not in to_w]
    sizes = dict(zip(left + right, x.shape + w.shape, strict=True))
    shape, order = [sizes[label] for label in kept], [kept.index(label) for label in right]
    return (
        product(equation, (inputs, 1), (kernel, 1)),
        product(f"{out},{right}->{left}", (upstream, 1), (kernel, 1)),
        tuple(np.transpose(each.reshape(shape), order) for each in (exact, bound)),
    )
