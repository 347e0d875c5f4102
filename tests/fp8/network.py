"""A small network of one shared layer in NumPy, and the Keras model it is the reference of.

    h1 = relu(x W1),  h2 = relu(h1 W1),  y = h2 W2        in FP8 or MXFP8, loss = mean (y - t)^2

Numbers are small multiples of powers of two, so that sums are exact in float32 whatever their order, and rounding to
FP8 falls the same way on both sides.
"""

import keras
import numpy as np
from mx_reference import numbers as in_blocks
from reference import quantize

from keras_mp.fp8 import Scalings
from keras_mp.layers import Float8Dense

RECIPES = {
    "current": Scalings.named("current", scale="power_of_two"),
    "mxfp8": Scalings.named("mxfp8", format={"gradient": "E5M2"}),
}
WIDTH = 16
RATE = 2.0**-2


def numbers(batches, batch_size=8):
    """Inputs, targets and the two kernels."""
    rng = np.random.default_rng()
    count = batches * batch_size
    x = rng.integers(-4, 5, (count, WIDTH)).astype("float32")
    t = rng.integers(-2, 3, (count, WIDTH)).astype("float32")
    kernels = [rng.integers(-8, 9, (WIDTH, WIDTH)).astype("float32") / 16 for _ in range(2)]
    return x, t, kernels


def gradients(x, t, kernels, scaling="current"):
    """Of the mean squared error, by the equations of `keras_mp.fp8.scaled_product`."""

    def q(x, name, axis):
        if scaling == "mxfp8":
            return in_blocks(x, name, "up", (axis,))
        values, scale = quantize(x, name, power_of_two=True)
        return values.astype("float64") / np.float64(scale)

    order = [0, 0, 1]
    inputs, result = [], x
    for index, kernel in enumerate(order):
        inputs.append(result)
        result = (q(result, "E4M3", 1) @ q(kernels[kernel], "E4M3", 0)).astype("float32")
        if index < 2:
            result = np.maximum(result, 0)
    upstream = (2 * (result - t) / t.size).astype("float32")
    sums = [np.zeros_like(kernel) for kernel in kernels]
    for index in reversed(range(3)):
        sums[order[index]] += (q(inputs[index], "E4M3", 0).T @ q(upstream, "E5M2", 0)).astype("float32")
        upstream = (q(upstream, "E5M2", 1) @ q(kernels[order[index]], "E4M3", 1).T).astype("float32")
        if index:
            upstream = upstream * (inputs[index] > 0)
    return sums


def build(kernels, scaling="current", **arguments):
    """The Keras model, with these kernels."""
    scaling = RECIPES[scaling]
    shared, last = (
        Float8Dense(WIDTH, use_bias=False, scaling=scaling, name=name, **arguments) for name in ("shared", "last")
    )
    inputs = keras.Input((WIDTH,))
    model = keras.Model(inputs, last(keras.ops.relu(shared(keras.ops.relu(shared(inputs))))))
    shared.set_weights([kernels[0]])
    last.set_weights([kernels[1]])
    return model


def kernels_of(model):
    return [keras.ops.convert_to_numpy(model.get_layer(name).kernel) for name in ("shared", "last")]


def assert_same(actual, expected):
    """Equal up to what float32 rounds in the updates."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-6 * np.max(np.abs(e)))
