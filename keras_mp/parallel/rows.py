"""Weights that are gathered in one byte: E4M3 with a scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_mp.precision.formats import E4M3, quantize, scale_to

LEAST_LENGTH = 32
"""Shorter rows stay as they are: the scale of a row has four bytes."""


class Rows:
    """Quantizes the rows of a weight, along its last axis.

        amax  = max |x| of the row
        scale = 2^floor(log2 min(448 / amax, 2^126))        1 where amax is 0, infinite or NaN
        codes = cast(x . scale)                             x = codes / scale

    A scale is a power of two, so that scaling rounds nothing, and codes / scale is exact in bfloat16.
    """

    def quantize(self, x: Any, largest: Callable[[Any], Any] | None) -> tuple[Any, Any]:
        """The codes of rows, and their scales.

        Args:
            x: floats of two or more axes.
            largest: the largest magnitude over all devices that have a part of a row, from this device's;
                None where rows are whole.

        Returns:
            E4M3 of x's shape; and float32 of that shape without the last axis, which a TPU would pad to 128.
        """
        amax = keras.ops.cast(keras.ops.max(keras.ops.abs(x), axis=-1), "float32")
        amax = amax if largest is None else largest(amax)
        scales = scale_to(E4M3.max, amax, power_of_two=True)
        return quantize(x, E4M3, scales[..., None]), scales

    def dequantize(self, codes: Any, scales: Any) -> Any:
        """The numbers of codes: float32."""
        return keras.ops.cast(codes, "float32") * (1.0 / scales)[..., None]
