"""GELU that keeps only its input for the backward pass."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_mp import backend

engine = backend.engine_of(__package__)

_SLOPE = math.sqrt(2 / math.pi)
_HALF_ROOT = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_CUBIC = 0.044715


def gelu(x: Any, approximate: bool = True) -> Any:
    """Applies GELU, in float32 inside.

        gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))      approximate
        gelu(x) = x / 2 (1 + erf(x / sqrt(2)))                           else

    The backward pass computes the tanh or erf anew from x, so no other array of its size is kept.

    Args:
        x: floats of any shape.
        approximate: whether GELU is computed by tanh, and not by erf.

    Returns:
        A tensor of the same shape and dtype.

    References:
        Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016 (arXiv:1606.08415), section 2.
    """

    @backend.custom_gradient
    def apply(x: Any) -> Any:
        return _forward(x, approximate), lambda upstream: _backward(x, upstream, approximate)

    return apply(x)


@keras.saving.register_keras_serializable("keras_mp")
class Gelu(keras.layers.Layer):
    """`gelu` as a layer; in inference Keras's own operation."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return gelu(inputs) if training else keras.ops.gelu(inputs, approximate=True)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


@engine.fused
def _forward(x: Any, approximate: bool) -> Any:
    wide = keras.ops.cast(x, "float32")
    inner = _tanh(wide) if approximate else keras.ops.erf(wide * _HALF_ROOT)
    return keras.ops.cast(0.5 * wide * (1.0 + inner), x.dtype)


@engine.fused
def _backward(x: Any, upstream: Any, approximate: bool) -> Any:
    # Without the barrier the compiler takes the tanh of the forward pass, and keeps it until here.
    (again,) = backend.barrier([x], [upstream])
    wide, upstream = keras.ops.cast(again, "float32"), keras.ops.cast(upstream, "float32")
    slope = _slope_of_tanh(wide) if approximate else _slope_of_erf(wide)
    return keras.ops.cast(upstream * slope, x.dtype)


def _slope_of_tanh(wide: Any) -> Any:
    tanh = _tanh(wide)
    inner = _SLOPE * (1.0 + 3.0 * _CUBIC * wide * wide)
    # 1 - tanh^2 is 0 long before the square of x overflows.
    return 0.5 * (1.0 + tanh) + keras.ops.where(tanh * tanh < 1.0, 0.5 * wide * (1.0 - tanh * tanh) * inner, 0.0)


def _slope_of_erf(wide: Any) -> Any:
    density = keras.ops.exp(-0.5 * wide * wide) * _DENSITY
    # The density is 0 long before x is infinite.
    return 0.5 * (1.0 + keras.ops.erf(wide * _HALF_ROOT)) + keras.ops.where(density > 0.0, wide * density, 0.0)


def _tanh(wide: Any) -> Any:
    return keras.ops.tanh(_SLOPE * wide * (1.0 + _CUBIC * wide * wide))
