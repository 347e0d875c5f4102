"""The loss scale as a state machine: a pure function of (state, finite), without an optimizer."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

# A scale and its reciprocal must both be normal float32 numbers, because gradients are multiplied by the latter.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


class LossScaleState(NamedTuple):
    """What a loss scale remembers from step to step: five scalars, of NumPy or of the backend.

    Attributes:
        scale: what the loss is multiplied by, float32.
        clean_steps: finite steps since the scale last grew or a step overflowed, int.
        hysteresis_left: the overflow that brings this to zero, and every one after it, lowers the scale, int.
        consecutive_skips: steps skipped in a row, up to now, int; zero says that the last step was finite.
        skipped_steps: steps skipped in all, int.
    """

    scale: Any
    clean_steps: Any
    hysteresis_left: Any
    consecutive_skips: Any
    skipped_steps: Any


class AnyLossScale(Protocol):
    """What `LossScale`, `StaticLossScale` and `NoLossScale` have in common."""

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""

    def next_state(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step whose gradients were finite, or were not.

        Args:
            state: the state before the step, in NumPy scalars or in tensors.
            finite: a bool, for NumPy scalars; a boolean tensor of shape (), for tensors.
        """

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this loss scale again."""


class _Configured:
    """Keras's get_config and from_config for a dataclass of numbers."""

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class LossScale(_Configured):
    """A dynamic loss scale: as high as the gradients allow.

    ```
    start:              scale = initial_scale, hysteresis_left = hysteresis

    a step is finite:   clean_steps += 1, consecutive_skips = 0
                        if clean_steps == growth_interval:
                            scale = min(scale * growth_factor, max_scale)
                            clean_steps = 0
                            hysteresis_left = hysteresis
                        if refill_on_clean: hysteresis_left = hysteresis

    a step overflows:   skip the step
                        clean_steps = 0, consecutive_skips += 1, skipped_steps += 1
                        hysteresis_left = max(hysteresis_left - 1, 0)
                        if hysteresis_left == 0: scale = max(scale * backoff_factor, min_scale)
    ```

    Args:
        initial_scale: the first scale, from min_scale to max_scale.
        growth_factor: what the scale grows by, 1 or more.
        backoff_factor: what the scale is multiplied by after an overflow, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows, as in PyTorch, Apex, jmp and Keras.
        min_scale: the floor. Below 1 the loss is made smaller, for gradients that overflow unscaled.
        max_scale: the ceiling.
        hysteresis: how many overflows it takes to lower the scale for the first time since the last growth; as in
            Megatron-LM. 1 lowers it at once.
        refill_on_clean: count the overflows of the hysteresis in a row, instead of since the last growth.

    Raises:
        ValueError: If a setting is out of its range.
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    refill_on_clean: bool = False

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
            _check_count(name, getattr(self, name))
        if not isinstance(self.refill_on_clean, bool):
            raise ValueError(f"refill_on_clean={self.refill_on_clean!r} must be True or False")
        for name in ("initial_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            _warn_unless_power_of_two(name, getattr(self, name))

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""
        return _start(self.initial_scale, self.hysteresis)

    def next_state(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step: the algorithm above, in selects instead of branches.

        Args:
            state: the state before the step, in NumPy scalars or in tensors.
            finite: whether the step's gradients are finite: a bool, or a boolean tensor of shape ().
        """
        xp = _namespace(finite)
        clean = xp.where(finite, state.clean_steps + 1, 0)
        grows = clean == self.growth_interval
        refills = finite if self.refill_on_clean else grows
        left = xp.where(finite, state.hysteresis_left, xp.maximum(state.hysteresis_left - 1, 0))
        grown = xp.minimum(state.scale * self.growth_factor, self.max_scale)
        lowered = xp.where(left == 0, xp.maximum(state.scale * self.backoff_factor, self.min_scale), state.scale)
        return _count_skips(state, finite)._replace(
            scale=xp.where(finite, xp.where(grows, grown, state.scale), lowered),
            clean_steps=xp.where(grows, 0, clean),
            hysteresis_left=xp.where(refills, self.hysteresis, left),
        )


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Configured):
    """A loss scale that never moves; a step that overflows is still skipped.

    Args:
        scale: what the loss is multiplied by.

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

    def next_state(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step: only the skips are counted."""
        return _count_skips(state, finite)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class NoLossScale(_Configured):
    """A scale of 1, for float32 and bfloat16: nothing is scaled, and a step that overflows is still skipped."""

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, in NumPy scalars."""
        return _start(1.0)

    def next_state(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step: only the skips are counted."""
        return _count_skips(state, finite)


def _start(scale: float, hysteresis: int = 1) -> LossScaleState:
    zero = np.int64(0)
    return LossScaleState(np.float32(scale), zero, np.int64(hysteresis), zero, zero)


def _count_skips(state: LossScaleState, finite: Any) -> LossScaleState:
    xp = _namespace(finite)
    return state._replace(
        consecutive_skips=xp.where(finite, 0, state.consecutive_skips + 1),
        skipped_steps=xp.where(finite, state.skipped_steps, state.skipped_steps + 1),
    )


def _namespace(finite: Any) -> Any:
    return np if isinstance(finite, (bool, np.bool_)) else keras.ops


def _as_float(value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _check_number(name: str, value: Any, in_range: bool, expected: str) -> None:
    if not (in_range and math.isfinite(_as_float(value))):
        raise ValueError(f"{name}={value!r} must be a finite number, {expected}")


def _check_scale(name: str, value: Any) -> None:
    in_range = _SMALLEST <= _as_float(value) <= _LARGEST
    _check_number(name, value, in_range, "positive, and from 2**-126 to 2**126, so that float32 holds its reciprocal")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of steps, 1 or more")


def _warn_unless_power_of_two(name: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        warnings.warn(
            f"{name}={value!r} is not a power of two: scaling and unscaling then round every gradient value, by up to "
            "1.2e-7 of it, and training is no longer bit for bit what it is without scaling",
            stacklevel=4,
        )
