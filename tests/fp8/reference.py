"""The FP8 products once more, in NumPy: operands by ml_dtypes, sums in float64."""

import keras
import numpy as np
from arrays import DTYPES as DTYPES
from arrays import MAX as MAX
from arrays import saturated as cast
from gradients_of import compiled as compiled
from zoo import normal as normal

from keras_mp.fp8.quantize import Known
from keras_mp.fp8.quantize import quantize as quantize_tensor


def quantize(x, name, power_of_two=False, axes=None):
    """Returns FP8 values and the float32 scale, or scales, one for all along some axes."""
    x = np.asarray(x, "float32")
    amax = np.max(np.abs(x), axis=axes, keepdims=axes is not None, initial=0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scale = np.minimum(np.float32(MAX[name]) / amax, np.float32(2.0**126))
        if power_of_two:
            scale = np.float32(2.0) ** np.floor(np.log2(scale.astype("float64"))).astype("float32")
        scale = np.where(np.isfinite(amax) & (amax > 0), scale, np.float32(1))
        return cast(x * scale, name), scale


def as_rows(x, axes):
    """A matrix whose rows are along some axes of a tensor."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    moved = np.transpose(x, [*kept, *axes])
    return moved.reshape(int(np.prod(moved.shape[: len(kept)])), -1)


def along(numbers, axes, x, *others):
    """What a function makes of the rows along some axes of tensors, as a tensor; it may fill rows up."""
    order = [*(axis for axis in range(x.ndim) if axis not in axes), *axes]
    rows = as_rows(x, axes)
    made = numbers(rows, *(as_rows(other, axes) for other in others))[:, : rows.shape[1]]
    return np.transpose(made.reshape([x.shape[axis] for axis in order]), np.argsort(order))


def row_product(equation, x, w, names, power_of_two=False):
    """Of two tensors that are each scaled along what is summed: as `product`."""
    left, right = equation.split("->")[0].split(",")
    axes = [tuple(i for i, label in enumerate(own) if label in other) for own, other in ((left, right), (right, left))]
    x, w = (
        values.astype("float64") / scale.astype("float64")
        for values, scale in (
            quantize(each, name, power_of_two, axis) for each, name, axis in zip((x, w), names, axes, strict=True)
        )
    )
    exact, bound = product(equation, (x, 1), (w, 1))
    return exact, 1.5 * bound  # a rounding more for each scale


def product(equation, left, right):
    """Of two quantized tensors: the sum in float64, and a bound of what rounding in float32 may change."""
    (a, scale_a), (b, scale_b) = left, right
    a, b = a.astype("float64"), b.astype("float64")
    scale = np.float64(scale_a) * np.float64(scale_b)
    exact = np.einsum(equation, a, b) / scale
    operands, out = equation.split("->")
    sizes = dict(zip(operands.replace(",", ""), a.shape + b.shape, strict=True))
    # An addition each, and five more roundings: of the two scales' product, its reciprocal, two products, the result.
    roundings = np.prod([size for label, size in sizes.items() if label not in out]) + 5
    return exact, np.einsum(equation, abs(a), abs(b)) / scale * roundings * 2.0**-24


class Product:
    """Forward and backward of one product: each attribute is a pair, the exact value and its float32 bound."""

    def __init__(self, equation, x, w, g, formats=("E4M3", "E4M3", "E5M2"), power_of_two=False):
        operands, out = equation.split("->")
        left, right = operands.split(",")
        x8, w8, g8 = (quantize(each, name, power_of_two) for each, name in zip((x, w, g), formats, strict=True))
        self.result = product(equation, x8, w8)
        self.input_gradient = product(f"{out},{right}->{left}", g8, w8)
        self.kernel_gradient = product(f"{left},{out}->{right}", x8, g8)


def assert_close(actual, expected):
    """Compares with what `product` returned, element by element."""
    exact, bound = expected
    actual = to_numpy(actual)
    assert actual.shape == exact.shape
    assert np.all(np.abs(actual - exact) <= bound), np.max(np.abs(actual - exact) / np.maximum(bound, 1e-300))


def quantized_by(scalings, x, role, axes=None, row=None, variable=0):
    """A tensor as a layer quantizes it in a role's first product, with what is known of the role."""
    known = None if row is None else Known(row[: scalings.kept], row[-1] if scalings.counts else None)
    return quantize_tensor(x, scalings.of(role)[0], axes, known, variable)


def sqnr(actual, exact):
    """Signal to quantization noise, in decibels: 10 log10(sum of squares / sum of squared errors)."""
    actual, exact = to_numpy(actual), np.asarray(exact, "float64")
    return 10 * np.log10(np.sum(exact**2) / np.sum((actual - exact) ** 2))


def to_numpy(x):
    """Any array in float64."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")), "float64")


def with_gradients(function):
    """Turns f(x, w) into a function of (x, w, g): the result, and the gradients of sum(g . f(x, w))."""
    if keras.backend.backend() == "jax":
        import jax

        def both(x, w, g):
            result, backward = jax.vjp(function, x, w)
            return (result, *backward(g))

        return both
    import tensorflow as tf

    def both(x, w, g):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            result = function(x, w)
        return (result, *tape.gradient(result, [x, w], output_gradients=g))

    return both


def tensors(*arrays, dtype="float32"):
    """The arrays as tensors of the backend."""
    return [keras.ops.cast(keras.ops.convert_to_tensor(np.asarray(x, "float32")), dtype) for x in arrays]
