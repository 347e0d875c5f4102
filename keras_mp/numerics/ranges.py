"""What a tensor would lose in a floating-point format: overflow, underflow, and the noise of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

# math.frexp's exponents of float32's values: 2**-149, the smallest subnormal one, to just below 2**128.
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -148, 128


@dataclass(frozen=True)
class Format:
    """A floating-point format that float32 values are rounded to.

    Source: IEEE 754-2019, table 3.5 (float16); Micikevicius et al. 2022 (arXiv:2209.05433), table 1 (E4M3, E5M2);
    bfloat16 is float32 with 7 bits of mantissa. The numbers are read from ml_dtypes.

    Attributes:
        name: "float16", "bfloat16", "E4M3" or "E5M2".
        dtype: the name of ml_dtypes or numpy for it.
        saturates: whether this kit's cast to it clips what is too large: true of the 8-bit formats.
    """

    name: str
    dtype: str
    saturates: bool = False

    @property
    def max(self) -> float:
        """The largest finite number."""
        return float(self._finfo.max)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all bits of the mantissa."""
        return float(self._finfo.smallest_normal)

    @property
    def smallest(self) -> float:
        """The smallest number above zero, a subnormal one."""
        return float(self._finfo.smallest_subnormal)

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype for numpy."""
        return np.dtype(self.dtype if self.dtype == "float16" else getattr(ml_dtypes, self.dtype))

    @property
    def _finfo(self) -> Any:
        return ml_dtypes.finfo(self.numpy_dtype)

    def overflows(self, value: float) -> bool:
        """Whether a finite number rounds to more than the largest one."""
        return math.isfinite(value) and not np.isfinite(_bare_cast(np.float32(value), self))

    def round(self, x: np.ndarray) -> np.ndarray:
        """Rounds float32 values to the nearest number of the format, ties to even.

        Args:
            x: float32, of any shape.

        Returns:
            float32 of x's shape. Past the largest number it is infinite, or that number where the format saturates.
        """
        if self.saturates:
            x = np.clip(x, np.float32(-self.max), np.float32(self.max))
        return _bare_cast(x, self)


def _bare_cast(x: Any, format: Format) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, "float32").astype(format.numpy_dtype).astype("float32")


FLOAT16 = Format("float16", "float16")
BFLOAT16 = Format("bfloat16", "bfloat16")
E4M3 = Format("E4M3", "float8_e4m3fn", saturates=True)
E5M2 = Format("E5M2", "float8_e5m2", saturates=True)

FORMATS = {each.name: each for each in (FLOAT16, BFLOAT16, E4M3, E5M2)}


def format_named(name: Any) -> Format:
    """Finds a format by its name.

    Args:
        name: "float16", "bfloat16", "E4M3" or "E5M2", in any case; a `Format` is returned as it is.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(name, Format):
        return name
    found = {each.name.lower(): each for each in FORMATS.values()}.get(name.lower() if isinstance(name, str) else name)
    if found is None:
        raise ValueError(f"format={name!r} is not known: use one of {', '.join(map(repr, FORMATS))}")
    return found


@dataclass(frozen=True)
class FormatLoss:
    """What a format loses of some values. Shares are of all values, zeros included, and exact zeros are never lost.

    Attributes:
        overflow: share that rounds to more than the largest number.
        zeroed: share that is not zero and rounds to zero.
        subnormal: share that rounds to a subnormal number, and so keeps fewer bits.
        sqnr: signal to quantization-noise ratio in decibels, 10 log10(sum x^2 / sum (round(x) - x)^2): infinite where
            nothing is lost, minus infinity where a value overflows to infinity, NaN where there is no signal.
    """

    overflow: float
    zeroed: float
    subnormal: float
    sqnr: float


@dataclass
class _Counts:
    overflow: float = 0.0
    zeroed: float = 0.0
    subnormal: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


@dataclass
class Range:
    """The range of a tensor that comes in parts, and what each format loses of it.

    ```
    update(x):  lowest, highest, zeros, ... over the finite values of x
                for each format:  y = round(x . scale) / scale
                    overflow += count(|x| rounds past the largest)     noise += sum (y - x)^2
                    zeroed   += count(y = 0 != x)                      signal += sum x^2
    ```

    Attributes:
        scales: what values are multiplied by before they are rounded, by the format's name; 1 where it is not given;
            None stands for max / amax of each part, as in `keras_mp.fp8.CurrentScaling`.
        values: how many there were; zeros and those that are not finite among them.
        lowest: the lowest finite value; infinity before the first.
        highest: the highest finite value.
        smallest: the smallest magnitude above zero; infinity where there is none.
    """

    scales: dict[str, float | None] = field(default_factory=dict)
    values: float = 0
    zeros: float = 0
    nan: float = 0
    inf: float = 0
    lowest: float = math.inf
    highest: float = -math.inf
    smallest: float = math.inf
    _counts: dict[str, _Counts] = field(default_factory=lambda: {name: _Counts() for name in FORMATS})
    _exponents: np.ndarray = field(default_factory=lambda: np.zeros(_HIGHEST_EXPONENT - _LOWEST_EXPONENT + 1))

    def update(
        self, x: Any, *, size: int | None = None, extremes: tuple[float, float] | None = None
    ) -> dict[str, np.ndarray]:
        """Takes in more values.

        Args:
            x: floats of any shape; all values, or a sample of them.
            size: how many there are, of which x is a sample.
            extremes: the lowest and the highest of all of them.

        Returns:
            The rounding errors of x by format, float32 or float64, flat; 0 for values that are not finite.
        """
        x = np.asarray(x)
        x = (x if x.dtype == np.float32 else x.astype("float32")).reshape(-1)
        if x.size == 0:
            return {name: x for name in FORMATS}
        weight = 1.0 if size is None else size / x.size
        finite = np.isfinite(x)
        clean = bool(finite.all())
        self.values += weight * x.size
        if not clean:
            nan = np.isnan(x).sum()
            self.nan += weight * nan
            self.inf += weight * (x.size - finite.sum() - nan)
            x = np.where(finite, x, np.float32(0))
        self._take_extremes(x[finite] if not clean else x, extremes)
        magnitude = np.abs(x)
        nonzero = magnitude > 0
        self.zeros += weight * (finite & ~nonzero).sum()
        if nonzero.any():
            self.smallest = min(self.smallest, float(magnitude[nonzero].min()))
            exponents = np.frexp(magnitude[nonzero])[1] - _LOWEST_EXPONENT
            self._exponents += weight * np.bincount(exponents, minlength=self._exponents.size)
        return {name: self._take(x, magnitude, nonzero, format, weight, extremes) for name, format in FORMATS.items()}

    def _take_extremes(self, x: np.ndarray, extremes: tuple[float, float] | None) -> None:
        ends = list(extremes) if extremes is not None else []
        ends += [float(x.min()), float(x.max())] if x.size else []
        for end in ends:
            if math.isfinite(end):
                self.lowest, self.highest = min(self.lowest, end), max(self.highest, end)

    def _take(
        self,
        x: np.ndarray,
        magnitude: np.ndarray,
        nonzero: np.ndarray,
        format: Format,
        weight: float,
        extremes: tuple[float, float] | None,
    ) -> np.ndarray:
        counts = self._counts[format.name]
        largest = max([abs(each) for each in extremes or () if math.isfinite(each)] + [float(magnitude.max())])
        scale = self.scales.get(format.name, 1.0)
        if scale is None:
            scale = current_scale(largest, format)
        factor = np.float32(scale)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = x if scale == 1.0 else x * factor
            # A scaled value past float32's own range has overflowed any format.
            rounded = format.round(scaled)
            # In float64 where it was scaled: the division would add errors of its own. The difference itself is exact.
            error = rounded - x if scale == 1.0 else rounded / np.float64(factor) - x
        small = np.abs(rounded) < format.smallest_normal
        counts.zeroed += weight * (nonzero & (rounded == 0)).sum()
        counts.subnormal += weight * (small & (rounded != 0)).sum()
        top = np.abs(scaled).max()
        if not np.isfinite(top) or format.overflows(float(top)):
            with np.errstate(over="ignore"):
                counts.overflow += weight * (~np.isfinite(_bare_cast(scaled, format))).sum()
        elif not np.isfinite(largest * scale) or format.overflows(largest * scale):
            counts.overflow += 1  # outside the sample
            if not format.saturates:
                counts.noise = math.inf
        counts.signal += weight * float(np.einsum("i,i->", x, x, dtype="float64"))
        counts.noise += weight * float(np.einsum("i,i->", error, error, dtype="float64"))
        return error

    def loss(self, format: Any) -> FormatLoss:
        """What a format loses of the values so far.

        Args:
            format: a `Format`, or its name.

        Raises:
            ValueError: there is no such format.
        """
        counts = self._counts[format_named(format).name]
        total = self.values or 1.0
        if not counts.signal:
            sqnr = math.nan
        elif not counts.noise:
            sqnr = math.inf
        else:
            sqnr = -math.inf if math.isinf(counts.noise) else 10 * math.log10(counts.signal / counts.noise)
        shares = (counts.overflow / total, counts.zeroed / total, counts.subnormal / total)
        return FormatLoss(*shares, sqnr)

    def share_below(self, exponent: int) -> float:
        """The share, of the values that are not zero, whose magnitude lies below 2**exponent."""
        nonzero = self._exponents.sum()
        place = min(max(exponent - _LOWEST_EXPONENT + 1, 0), self._exponents.size)
        return float(self._exponents[:place].sum() / nonzero) if nonzero else 0.0

    @property
    def largest(self) -> float:
        """The largest finite magnitude; 0 where there is no finite value."""
        return max(abs(self.lowest), abs(self.highest)) if self.values and math.isfinite(self.highest) else 0.0

    @property
    def mean_square(self) -> float:
        """The mean of the squares of the finite values; 0 where there is none."""
        finite = self.values - self.nonfinite
        return self._counts["float16"].signal / finite if finite else 0.0

    @property
    def nonfinite(self) -> float:
        """How many values are infinite or NaN."""
        return self.nan + self.inf


def merged(ranges: Iterable[Range]) -> Range:
    """The range of several tensors together."""
    whole = Range()
    for each in ranges:
        whole.scales = each.scales
        for name in ("values", "zeros", "nan", "inf"):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        whole.lowest, whole.highest = min(whole.lowest, each.lowest), max(whole.highest, each.highest)
        whole.smallest = min(whole.smallest, each.smallest)
        whole._exponents = whole._exponents + each._exponents
        for name, counts in each._counts.items():
            for key, value in vars(counts).items():
                setattr(whole._counts[name], key, getattr(whole._counts[name], key) + value)
    return whole


def current_scale(largest: float, format: Format) -> float:
    """The scale of `keras_mp.fp8.CurrentScaling`: max / amax, finite in float32; 1 where amax is 0."""
    if not largest:
        return 1.0
    return min(format.max / largest, float(np.finfo("float32").max))


def measure(x: Any, format: Any, scale: float | None = 1.0) -> FormatLoss:
    """What a format loses of a tensor.

    Args:
        x: floats of any shape, or what numpy makes an array of; also empty.
        format: "float16", "bfloat16", "E4M3" or "E5M2".
        scale: what x is multiplied by before it is rounded; None for max / amax.

    Returns:
        The shares that overflow, become zero, become subnormal, and the SQNR. Values that are infinite or NaN count
        among the values, and are lost in no format.

    Raises:
        ValueError: there is no such format, or scale is not a positive finite number.
    """
    format = format_named(format)
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r} must be a positive finite number, or None for max / amax")
    measured = Range({format.name: scale})
    measured.update(x)
    return measured.loss(format)
