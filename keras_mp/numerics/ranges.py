"""What a tensor loses in a floating-point format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_mp.precision.formats import FORMATS, Format, current_scale, format_named

# Half of float16's smallest number: what is smaller rounds to zero, and half of it to the even one, too.
_VANISHES = 2.0**-25


@dataclass(frozen=True)
class FormatLoss:
    """Loss of values in a format, as shares of all."""

    overflow: float  # the share that rounds to more than the largest number
    zeroed: float  # the share that is not zero and rounds to zero
    # Signal to quantization-noise ratio in decibels, 10 log10(sum x^2 / sum (round(x) - x)^2): infinite where nothing
    # is lost, minus infinity where a value overflows to infinity, NaN where there is no signal.
    sqnr: float


@dataclass
class _Counts:
    overflow: float = 0.0
    zeroed: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


@dataclass
class Range:
    """Range of a tensor, in parts, and each format's loss.

    ```
    update(x):  lowest, highest, zeros, ... over the finite values of x
                for each format:  y = round(x . scale) / scale
                    overflow += count(|x| rounds past the largest)     noise += sum (y - x)^2
                    zeroed   += count(y = 0 != x)                      signal += sum x^2
    ```

    Attributes:
        scales: the factors that values are multiplied by before they are rounded, by the format's name; 1 where it is
            not given; None stands for `current_scale` of each part, as the scaling "current" of `keras_mp.fp8` has it.
        values: the number of values; zeros and those that are not finite among them.
        lowest: the lowest finite value; infinity before the first.
        highest: the highest finite value.
        vanishing: the number of values above zero that float16 rounds to zero where nothing scales them.
    """

    scales: dict[str, float | None] = field(default_factory=dict)
    values: float = 0
    zeros: float = 0
    nonfinite: float = 0
    lowest: float = math.inf
    highest: float = -math.inf
    vanishing: float = 0
    _counts: dict[str, _Counts] = field(default_factory=lambda: {name: _Counts() for name in FORMATS})

    def update(self, x: Any, *, size: int | None = None, extremes: tuple[float, float] | None = None) -> None:
        """Takes in more values.

        Args:
            x: floats of any shape; all values, or a sample of them.
            size: the number of values of which x is a sample.
            extremes: the lowest and the highest of all of them.
        """
        x = np.asarray(x)
        x = (x if x.dtype == np.float32 else x.astype("float32")).reshape(-1)
        if x.size == 0:
            return
        weight = 1.0 if size is None else size / x.size
        finite = np.isfinite(x)
        clean = bool(finite.all())
        self.values += weight * x.size
        if not clean:
            self.nonfinite += weight * (x.size - finite.sum())
            x = np.where(finite, x, np.float32(0))
        own = x if clean else x[finite]
        for end in [*(extremes or ()), *([float(own.min()), float(own.max())] if own.size else [])]:
            if math.isfinite(end):
                self.lowest, self.highest = min(self.lowest, end), max(self.highest, end)
        magnitude = np.abs(x)
        nonzero = magnitude > 0
        self.zeros += weight * (finite & ~nonzero).sum()
        self.vanishing += weight * (nonzero & (magnitude <= _VANISHES)).sum()
        for format in FORMATS.values():
            self._take(x, magnitude, nonzero, format, weight, extremes)

    def _take(
        self,
        x: np.ndarray,
        magnitude: np.ndarray,
        nonzero: np.ndarray,
        format: Format,
        weight: float,
        extremes: tuple[float, float] | None,
    ) -> None:
        counts = self._counts[format.name]
        largest = max([abs(end) for end in extremes or () if math.isfinite(end)] + [float(magnitude.max())])
        scale = self.scales.get(format.name, 1.0)
        if scale is None:
            scale = current_scale(largest, format)
        factor = np.float32(scale)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = x if scale == 1.0 else x * factor
            # A scaled value past float32's own range has overflowed any format.
            top = np.abs(scaled).max()
            rounded = format.round(scaled)
            # In float64 where it was scaled: the division would add errors of its own. The difference itself is exact.
            error = rounded - x if scale == 1.0 else rounded / np.float64(factor) - x
        if not np.isfinite(top):
            error = np.where(np.isnan(error), np.inf, error)  # NaN in the 8-bit formats, which have no use for infinity
        counts.zeroed += weight * (nonzero & (rounded == 0)).sum()
        if not np.isfinite(top) or format.overflows(float(top)):
            with np.errstate(over="ignore"):
                counts.overflow += weight * (~np.isfinite(format.round_unclipped(scaled))).sum()
        elif not np.isfinite(largest * scale) or format.overflows(largest * scale):
            counts.overflow += 1  # outside the sample
            if not format.saturates:
                counts.noise = math.inf
        counts.signal += weight * float(np.einsum("i,i->", x, x, dtype="float64"))
        counts.noise += weight * float(np.einsum("i,i->", error, error, dtype="float64"))

    def loss(self, format: Any) -> FormatLoss:
        """The loss of the values so far in a format."""
        counts = self._counts[format_named(format).name]
        total = self.values or 1.0
        if not counts.signal:
            sqnr = math.nan
        elif not counts.noise:
            sqnr = math.inf
        else:
            sqnr = -math.inf if math.isinf(counts.noise) else 10 * math.log10(counts.signal / counts.noise)
        return FormatLoss(counts.overflow / total, counts.zeroed / total, sqnr)

    @property
    def share_vanishing(self) -> float:
        """The share of nonzero values that vanish in float16."""
        nonzero = self.values - self.zeros - self.nonfinite
        return self.vanishing / nonzero if nonzero else 0.0

    @property
    def largest(self) -> float:
        """Largest finite magnitude, or 0."""
        return max(abs(self.lowest), abs(self.highest)) if self.values and math.isfinite(self.highest) else 0.0


def merged(ranges: Iterable[Range]) -> Range:
    """The range of several tensors together."""
    whole = Range()
    for part in ranges:
        whole.scales = part.scales
        for name in ("values", "zeros", "nonfinite", "vanishing"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.lowest, whole.highest = min(whole.lowest, part.lowest), max(whole.highest, part.highest)
        for name, counts in part._counts.items():
            for key, value in vars(counts).items():
                setattr(whole._counts[name], key, getattr(whole._counts[name], key) + value)
    return whole


# A sample of a tensor's values that is spread over every axis.


def sampled(x: Any, most: int | None, flatten: Any) -> Any:
    """Samples at most `most` values of a tensor, or all."""
    shape = tuple(x.shape)
    size = math.prod(shape)
    if most is None or size <= most:
        return flatten(x)
    # No divisor in common with any size of the shape, so that no channel, row or record is left out.
    stride = -(-size // most)
    while any(math.gcd(stride, length) > 1 for length in shape):
        stride += 1
    return flatten(x)[::stride]
