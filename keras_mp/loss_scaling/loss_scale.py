"""The loss scale as a state machine: a pure function of (state, finite), without an optimizer."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np

from keras_mp.system.argument_checks import whole_number

# A scale and its reciprocal must both be normal float32 numbers, because gradients are multiplied by the latter.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


class LossScaleState(NamedTuple):
    """State of a loss scale: five scalars, NumPy's or tensors."""

    scale: Any  # the number that the loss is multiplied by, float32
    clean_steps: Any  # finite steps since the scale last grew or a step overflowed, int
    hysteresis_left: Any  # the overflow that brings this to zero, and every one after it, lowers the scale, int
    consecutive_skips: Any  # steps skipped in a row, up to now, int; zero says that the last step was finite
    skipped_steps: Any  # steps skipped in all, int


class AnyLossScale:
    """Base of the three loss scales, which counts skips."""

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""
        return _start(1.0)

    def next_state(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step.

        Args:
            state: the state before the step, in NumPy scalars or in tensors.
            finite: whether the step's gradients are finite: a bool, or a boolean tensor of shape ().
        """
        if isinstance(finite, (bool, np.bool_)):
            return self._after_finite(state) if finite else self._after_overflow(state)
        both = zip(self._after_finite(state), self._after_overflow(state), strict=True)
        return LossScaleState(*(_choose(finite, *values) for values in both))

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        return state._replace(consecutive_skips=0)

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        return state._replace(consecutive_skips=state.consecutive_skips + 1, skipped_steps=state.skipped_steps + 1)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this loss scale again."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a loss scale from its config."""
        return cls(**config)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class LossScale(AnyLossScale):
    """A dynamic loss scale: as high as the gradients allow.

    ```
    start:              scale = initial_scale, hysteresis_left = hysteresis

    a step is finite:   clean_steps += 1, consecutive_skips = 0
                        if clean_steps == growth_interval:
                            scale = min(scale * growth_factor, max_scale)
                            clean_steps = 0
                            hysteresis_left = hysteresis

    a step overflows:   skip the step
                        clean_steps = 0, consecutive_skips += 1, skipped_steps += 1
                        hysteresis_left = max(hysteresis_left - 1, 0)
                        if hysteresis_left == 0: scale = max(scale * backoff_factor, min_scale)
    ```

    Args:
        initial_scale: the first scale, from min_scale to max_scale.
        growth_factor: the factor by which the scale grows, 1 or more.
        backoff_factor: the factor by which the scale is multiplied after an overflow, between 0 and 1.
        growth_interval: the number of finite steps in a row before the scale grows, as in PyTorch, Apex, jmp and Keras.
        min_scale: the least scale. Below 1 the loss is made smaller, for gradients that overflow unscaled.
        max_scale: the largest scale.
        hysteresis: the number of overflows that lower the scale for the first time since the last growth; as in
            Megatron-LM. 1 lowers it at once.

    Raises:
        ValueError: If a setting is out of its range.

    Examples:
        >>> import keras, keras_mp
        >>> optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), keras_mp.LossScale(initial_scale=2.0**12))
        >>> keras_mp.LossScale.static(1024.0)  # a constant scale
        LossScale.static(scale=1024.0)
        >>> keras_mp.LossScale.none()  # for float32 and bfloat16
        LossScale.none()
    """

    static: ClassVar[type[StaticLossScale]]
    none: ClassVar[type[NoLossScale]]

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            _check_scale(name, getattr(self, name))
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}: the floor must not be above the "
                "ceiling"
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale={self.initial_scale!r} is outside min_scale={self.min_scale!r} to "
                f"max_scale={self.max_scale!r}: start between the two, or move them"
            )
        _check_number("growth_factor", self.growth_factor, 1.0 <= _as_float(self.growth_factor), "1 or more")
        in_between = 0.0 < _as_float(self.backoff_factor) < 1.0
        _check_number("backoff_factor", self.backoff_factor, in_between, "between 0 and 1, both excluded")
        for name in ("growth_interval", "hysteresis"):
            whole_number(name, getattr(self, name), unit="steps")
        for name in ("initial_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            _warn_unless_power_of_two(name, getattr(self, name))

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""
        return _start(self.initial_scale, self.hysteresis)

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        clean = state.clean_steps + 1
        grows = clean == self.growth_interval
        grown = _namespace(state.scale).minimum(state.scale * self.growth_factor, self.max_scale)
        counted = super()._after_finite(state)
        return counted._replace(
            scale=_choose(grows, grown, state.scale),
            clean_steps=_choose(grows, 0, clean),
            hysteresis_left=_choose(grows, self.hysteresis, state.hysteresis_left),
        )

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        maximum = _namespace(state.scale).maximum
        left = maximum(state.hysteresis_left - 1, 0)
        lowered = maximum(state.scale * self.backoff_factor, self.min_scale)
        counted = super()._after_overflow(state)
        return counted._replace(scale=_choose(left == 0, lowered, state.scale), clean_steps=0, hysteresis_left=left)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class StaticLossScale(AnyLossScale):
    """Constant scale; a step that overflows is still skipped.

    Args:
        scale: the number that the loss is multiplied by.

    Raises:
        ValueError: If scale is not a positive, finite number.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale("scale", self.scale)
        _warn_unless_power_of_two("scale", self.scale)

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""
        return _start(self.scale)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class NoLossScale(AnyLossScale):
    """Scale of 1; a step that overflows is still skipped."""


# Two more under the public name, which their texts and pickles say.
LossScale.static, LossScale.none = StaticLossScale, NoLossScale
StaticLossScale.__qualname__, NoLossScale.__qualname__ = "LossScale.static", "LossScale.none"


def _start(scale: float, hysteresis: int = 1) -> LossScaleState:
    zero = np.int64(0)
    return LossScaleState(np.float32(scale), zero, np.int64(hysteresis), zero, zero)


def _namespace(number: Any) -> Any:
    return np if isinstance(number, (int, float, np.generic)) else keras.ops


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, (bool, np.bool_)):
        return yes if condition else no
    return keras.ops.where(condition, yes, no)


def warn_if_needless(what: str, loss_scale: AnyLossScale) -> None:
    """Warns that computing in bfloat16 needs no loss scaling."""
    if not isinstance(loss_scale, NoLossScale):
        warnings.warn(
            f"{what} computes in bfloat16, which has the range of float32: scaling the loss gains nothing. Use "
            "loss_scale=keras_mp.LossScale.none(), which still checks and skips, or no LossScaleOptimizer",
            stacklevel=3,
        )


def _as_float(value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _check_number(name: str, value: Any, in_range: bool, expected: str) -> None:
    if not (in_range and math.isfinite(_as_float(value))):
        raise ValueError(f"{name}={value!r} must be a finite number, {expected}")


def _check_scale(name: str, value: Any) -> None:
    in_range = _SMALLEST <= _as_float(value) <= _LARGEST
    _check_number(name, value, in_range, "positive, and from 2**-126 to 2**126, so that float32 holds its reciprocal")


def _warn_unless_power_of_two(name: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        warnings.warn(
            f"{name}={value!r} is not a power of two: scaling and unscaling then round every gradient value, by up to "
            "1.2e-7 of it, and training is no longer bit for bit what it is without scaling",
            stacklevel=4,
        )
