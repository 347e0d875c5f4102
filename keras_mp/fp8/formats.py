"""The two 8-bit floating-point formats, and the cast to them that saturates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from keras_mp import backend

# Of a float32: the bits of the exponent; and the number whose last bit is 1, and stays so if up to 2^22 is added.
_EXPONENT = 0x7F800000
_ROUNDER = 1.5 * 2.0**23


@dataclass(frozen=True)
class Float8Format:
    """An 8-bit floating-point format.

    Source of every number: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433), table 1.

    Attributes:
        name: "E4M3" or "E5M2", for the bits of exponent and mantissa.
        dtype: what Keras calls it.
        mantissa_bits: stored bits of the mantissa.
        min_exponent: binary exponent of the smallest normal number.
        max: the largest finite number.
    """

    name: str
    dtype: str
    mantissa_bits: int
    min_exponent: int
    max: float

    @property
    def smallest(self) -> float:
        """The smallest number above zero, a subnormal one; also the distance of subnormal numbers."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


E4M3 = Float8Format("E4M3", "float8_e4m3fn", mantissa_bits=3, min_exponent=-6, max=448.0)
"""More precision: largest number 448, no infinity."""

E5M2 = Float8Format("E5M2", "float8_e5m2", mantissa_bits=2, min_exponent=-14, max=57344.0)
"""More range: largest number 57344."""

FORMATS = {each.name: each for each in (E4M3, E5M2)}


def format_named(name: Any) -> Float8Format:
    """Finds a format by its name.

    Args:
        name: "E4M3" or "E5M2"; a format is returned as it is.

    Returns:
        The format.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(name, Float8Format):
        return name
    if not isinstance(name, str) or name.upper() not in FORMATS:
        raise ValueError(f"format={name!r} is no 8-bit floating-point format: use {' or '.join(map(repr, FORMATS))}")
    return FORMATS[name.upper()]


def cast(x: Any, format: Float8Format) -> Any:
    """Rounds to the nearest number of a format, ties to even; past the largest it saturates.

        c       = clip(x, -max, max)
        step    = max(2^floor(log2 |c|), 2^min_exponent) . 2^-mantissa_bits
        cast(x) = (c + 1.5 . 2^23 . step) - 1.5 . 2^23 . step           a zero has no sign
                = NaN where x is not finite, so that an overflow stays visible

    The large number leaves a float32 no bit below the step, so that adding it rounds.

    A compiler's own cast gives NaN or infinity past the largest number. It also rounds twice where it goes through
    float16: in jax 0.7.2 out of jit and TensorFlow 2.20 in jit, 1 of some 700 random numbers is one step off. So the
    rounding is done here, in float32, and what is left to the compiler is exact. It is done without a comparison: a
    GPU's compiler writes the result of one to memory where the FP8 tensor is wanted transposed.

    Args:
        x: floats of any shape.
        format: `E4M3` or `E5M2`.

    Returns:
        A tensor of `format.dtype`, of x's shape.
    """
    x = keras.ops.cast(x, "float32")
    clipped = keras.ops.clip(x, -format.max, format.max)
    power = backend.bitcast(keras.ops.bitwise_and(backend.bitcast(clipped, "int32"), _EXPONENT), "float32")
    rounder = keras.ops.maximum(power, 2.0**format.min_exponent) * (_ROUNDER * 2.0**-format.mantissa_bits)
    # x - x is 0 or, of what is not finite, NaN.
    return keras.ops.cast((clipped + rounder) - rounder - (x - x), format.dtype)


def quantize(x: Any, format: Float8Format, scale: Any) -> Any:
    """Scales in float32 and casts: `cast(x . scale)`.

    Args:
        x: floats of any shape.
        format: `E4M3` or `E5M2`.
        scale: float32, of a shape that broadcasts to x's.

    Returns:
        A tensor of `format.dtype`, of x's shape.
    """
    return cast(keras.ops.cast(x, "float32") * scale, format)


def dequantize(values: Any, scale: Any) -> Any:
    """Undoes the scaling: `float32(values) / scale`.

    Args:
        values: what `quantize` returned.
        scale: the scale that it was given.

    Returns:
        A float32 tensor of the shape of values.
    """
    return keras.ops.cast(values, "float32") / scale
