"""The formats below float32, rounding, and scales of 8-bit ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_mp import backend
from keras_mp.system.argument_checks import one_of

MAX_SCALE = 2.0**126
"""The largest power of two whose reciprocal is a normal float32: a smaller reciprocal would be flushed to zero."""

# Of a float32: the bits of the exponent, and those with the sign's; and the number whose last bit is 1, and stays so if
# up to 2^22 is added.
_EXPONENT = 0x7F800000
_SIGN_AND_EXPONENT = -1 << 23
_ROUNDER = 1.5 * 2.0**23


@dataclass(frozen=True)
class Format:
    """A floating-point format that float32 values are rounded to.

    Sources: IEEE 754-2019, table 3.5 (float16); Micikevicius et al., "FP8 Formats for Deep Learning", 2022
    (arXiv:2209.05433), table 1 (E4M3, E5M2); bfloat16 is float32 with 7 bits of mantissa.
    """

    name: str  # "float16", "bfloat16" or "INT8"; or "E4M3", "E5M2", "E2M1", for the bits of exponent and mantissa
    dtype: str
    mantissa_bits: int  # those that are stored
    min_exponent: int  # the binary exponent of the smallest normal number
    max: float  # the largest finite number
    saturates: bool = False  # whether keras_mp's cast to it clips a finite value past that: true of 8 and 4 bits
    has_nan: bool = True  # whether it has a number for what is not finite

    def overflows(self, value: float) -> bool:
        """Whether a finite number rounds past the largest one."""
        return math.isfinite(value) and not bool(np.isfinite(self.round_unclipped(value)))

    def round(self, x: Any) -> np.ndarray:
        """Rounds float32 numbers to the nearest, ties to even.

        Past the largest number the result is infinite, or that number where the format saturates; there, an infinity or
        a NaN becomes NaN, as in `cast`.
        """
        x = np.asarray(x, "float32")
        if not self.saturates:
            return self.round_unclipped(x)
        clipped = np.clip(x, np.float32(-self.max), np.float32(self.max))
        return self.round_unclipped(np.where(np.isfinite(x), clipped, np.float32(np.nan)))

    def round_unclipped(self, x: Any) -> np.ndarray:
        """Rounds to infinity or NaN past the largest number."""
        dtype = self.dtype if self.dtype == "float16" else getattr(ml_dtypes, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(x, "float32").astype(dtype).astype("float32")


FLOAT16 = Format("float16", "float16", mantissa_bits=10, min_exponent=-14, max=65504.0)
"""More precision than bfloat16, and less range: largest number 65504."""

BFLOAT16 = Format("bfloat16", "bfloat16", mantissa_bits=7, min_exponent=-126, max=(2 - 2**-7) * 2.0**127)
"""The range of float32."""

E4M3 = Format("E4M3", "float8_e4m3fn", mantissa_bits=3, min_exponent=-6, max=448.0, saturates=True)
"""More precision: largest number 448, no infinity."""

E5M2 = Format("E5M2", "float8_e5m2", mantissa_bits=2, min_exponent=-14, max=57344.0, saturates=True)
"""More range: largest number 57344."""

E2M1 = Format("E2M1", "float4_e2m1fn", mantissa_bits=1, min_exponent=0, max=6.0, saturates=True, has_nan=False)
"""0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign: OCP Microscaling Formats Specification v1.0, section 5.3.3."""

INT8 = Format("INT8", "int8", mantissa_bits=7, min_exponent=7, max=127.0, saturates=True, has_nan=False)
"""Whole numbers, which lie one apart as the subnormal numbers of a format do; -128 is left out, so that the range is
symmetric."""

FORMATS: Mapping[str, Format] = MappingProxyType({format.name: format for format in (FLOAT16, BFLOAT16, E4M3, E5M2)})
"""The formats of a tensor without a scale, or with one for all of it, by name."""

SCALED_FORMATS: Mapping[str, Format] = MappingProxyType({format.name: format for format in (E4M3, E5M2, INT8, E2M1)})
"""The formats of 8 and 4 bits, by name: a tensor is scaled into them."""


def format_named(name: Any, formats: Mapping[str, Format] = FORMATS) -> Format:
    """Finds a format by its name; a format is returned.

    Raises:
        ValueError: If there is none of that name.
    """
    for known, format in formats.items():
        if name == format or (isinstance(name, str) and name.lower() == known.lower()):
            return format
    return formats[one_of("format", name, formats)]


def current_scale(amax: float, format: Format) -> float:
    """The scale of a magnitude, as `scale_to` computes it."""
    return min(format.max / amax, MAX_SCALE) if amax > 0 and math.isfinite(amax) else 1.0


def scale_to(top: float, amax: Any, power_of_two: bool = False) -> Any:
    """The scale that brings a magnitude to a number.

    Args:
        top: the number that the magnitude is brought to.
        amax: the magnitude, float32 of any shape.
        power_of_two: whether the scale is rounded down to a power of two.

    Returns:
        float32 of amax's shape: min(top / amax, 2^126), and 1 where amax is 0, infinite or NaN.
    """
    scale = keras.ops.minimum(top / amax, MAX_SCALE)
    if power_of_two:
        scale = backend.bitcast(keras.ops.bitwise_and(backend.bitcast(scale, "int32"), _SIGN_AND_EXPONENT), "float32")
    usable = keras.ops.logical_and(amax > 0, keras.ops.isfinite(amax))
    return keras.ops.where(usable, scale, keras.ops.ones_like(scale))


def cast(x: Any, format: Format, bits: Any = None) -> Any:
    """Rounds to 8 or 4 bits, saturating past the largest.

        c       = clip(x, -max, max)
        step    = max(2^floor(log2 |c|), 2^min_exponent) . 2^-mantissa_bits
        cast(x) = (c + 1.5 . 2^23 . step) - 1.5 . 2^23 . step           to the nearest, ties to even
                = floor(c / step + u) . step                            with bits: stochastically, 0 < u < 1
                = NaN where x is not finite, so that an overflow stays visible, if the format has a NaN

    A zero has no sign. The large number leaves a float32 no bit below the step, so that adding it rounds. u is
    (k + 1/2) / 2^16, where k are the 16 high bits of a word: 0 <= c / step - floor(c / step) < 1 is the probability of
    the upper neighbour, to 2^-17.

    A compiler's own cast gives NaN or infinity past the largest number. It also rounds twice where it goes through
    float16: in jax 0.7.2 out of jit and TensorFlow 2.20 in jit, 1 of some 700 random numbers is one step off. So the
    rounding is done here, in float32, and the compiler's part is exact. It is done without a comparison: a GPU's
    compiler writes the result of one to memory where the FP8 tensor is wanted transposed.

    Args:
        x: floats of any shape.
        format: `E4M3`, `E5M2`, `E2M1` or `INT8`.
        bits: uint32 of x's shape, random words; None to round to the nearest.

    Returns:
        A tensor of `format.dtype`, of x's shape; of E2M1 on TensorFlow, which has no such dtype, of E4M3's.
    """
    x = keras.ops.cast(x, "float32")
    clipped = keras.ops.clip(x, -format.max, format.max)
    power = backend.bitcast(keras.ops.bitwise_and(backend.bitcast(clipped, "int32"), _EXPONENT), "float32")
    step_times = keras.ops.maximum(power, 2.0**format.min_exponent)
    if bits is None:
        rounder = step_times * (_ROUNDER * 2.0**-format.mantissa_bits)
        rounded = (clipped + rounder) - rounder
    else:
        step = step_times * 2.0**-format.mantissa_bits
        high = keras.ops.right_shift(bits, keras.ops.convert_to_tensor(16, "uint32"))
        fraction = keras.ops.cast(keras.ops.cast(high, "int32"), "float32") * 2.0**-16 + 2.0**-17
        rounded = keras.ops.floor(clipped / step + fraction) * step
    if format.has_nan:
        rounded = rounded - (x - x)  # x - x is 0 or, of what is not finite, NaN
    return backend.as_float4(rounded) if format == E2M1 else keras.ops.cast(rounded, format.dtype)


def scale_and_cast(x: Any, format: Format, scale: Any) -> Any:
    """Scales in float32 and casts: `cast(x . scale)`."""
    return cast(keras.ops.cast(x, "float32") * scale, format)
