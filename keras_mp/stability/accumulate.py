"""Products of 16-bit operands with float32 results."""

from __future__ import annotations

import string
from typing import Any

import keras

from keras_mp import backend

engine = backend.engine_of(__package__)

MASKED_SCORE = -0.7 * 3.4e38
"""The score of a key that is not seen: finite, so that the difference of two is 0 and not NaN; Keras has the same."""


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors into float32; gradients alike.

        out       = sum(left . right)                          float32
        grad left = sum(cast(grad out, 16 bit) . right)        float32, then 16 bit

    A plain 16-bit product accumulates in float32 too and then rounds; here the rounding is left out, at the same cost
    in the matrix units.

    Args:
        equation: an equation as for einsum, such as "abc,cd->abd": two operands, no ellipsis, no label that stands in
            one operand and nowhere else.
        left, right: tensors, both in float16 or both in bfloat16.
    """
    operands, out = equation.split("->")
    left_labels, right_labels = operands.split(",")
    dtype = left.dtype

    @backend.custom_gradient
    def contract(left: Any, right: Any) -> Any:
        scope = backend.gradient_scope()

        def gradient(upstream: Any) -> Any:
            low = keras.ops.cast(upstream, dtype)
            with scope():
                to_left = engine.einsum_float32(f"{out},{right_labels}->{left_labels}", low, right)
                to_right = engine.einsum_float32(f"{left_labels},{out}->{right_labels}", left, low)
            return keras.ops.cast(to_left, dtype), keras.ops.cast(to_right, dtype)

        return engine.einsum_float32(equation, left, right), gradient

    return contract(left, right)


def last_axis(rank: int) -> str:
    """The equation of a Dense layer, by rank."""
    labels = string.ascii_lowercase[:rank]
    return f"{labels},{labels[-1]}z->{labels[:-1]}z"


def product_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts tensors as `einsum_float32`, float32 ones too, without a gradient."""
    if keras.backend.standardize_dtype(left.dtype) == "float32":
        return keras.ops.einsum(equation, left, right)
    return engine.einsum_float32(equation, left, right)


class SumsInFloat32:
    """Marks a layer whose product itself adds up in float32."""
