"""The scaling recipe of FP8 products whose scales are calibrated in the first steps, and then stay."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import keras

from keras_mp import backend
from keras_mp.fp8.roles import HYBRID, RoleFormats, check_role
from keras_mp.fp8.scaling_recipe import Quantized, Recipe
from keras_mp.fp8.step_count import next_step
from keras_mp.fp8.whole_amax import amax_of
from keras_mp.system.whole_number import whole_number


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class StaticScaling(Recipe):
    """A scale per tensor, from the largest magnitude of the first steps; after them nothing is looked for.

        amax_t = max(|x_1|, ..., |x_t|)                     in the first calibration_steps steps
               = amax_calibration_steps                     after them
        scale  = min(max of the format / (2^margin . amax), 2^126)          1 where amax is 0
        x8     = cast(x_t . scale)                          what exceeds the format saturates

    Magnitudes that are not finite are left out. Where the amax is 0 after the calibration, a tensor scales by itself.
    A step of which nothing is applied does not count. The amaxes and the number of steps are saved with the layer.

    Magnitudes that grow after the calibration saturate, as they do in a training from the beginning: `margin` leaves
    room above, at the cost of as many powers of two below, of which E4M3 has 15 and E5M2 30 for normal numbers.
    Gradients of a scaled loss grow with the loss scale: use `DelayedScaling` there.

    Formula: `DelayedScaling`, with amaxes that are kept.

    Args:
        calibration_steps: 1 or more.
        margin: how many powers of two the largest known magnitude stays below the top of the format.
        format: as of `CurrentScaling`.
        power_of_two: as of `CurrentScaling`.

    Raises:
        ValueError: calibration_steps is no whole number of 1 or more, margin no whole number of 0 or more; or as
            `CurrentScaling`.
    """

    calibration_steps: int = 16
    margin: int = 4
    format: RoleFormats = HYBRID
    power_of_two: bool = False
    counts_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("calibration_steps", 1), ("margin", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))

    @property
    def is_static(self) -> bool:
        return True

    @property
    def history_length(self) -> int:
        # The amax stands in the second place: the first is added up where calls meet in one slot.
        return 2

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        check_role(role)
        if history is None:
            return self.scaled(x, role, amax_of(x), self.margin)
        known = history[1]
        looks = keras.ops.logical_or(history[-1] < self.calibration_steps, known <= 0)
        amax = keras.ops.cond(looks, lambda: keras.ops.maximum(known, _amax_apart(x)), lambda: known)
        return self.scaled(x, role, amax, self.margin)

    def amax(self, x: Any, history: Any) -> Any:
        calibrates = history[0, -1] < self.calibration_steps
        return keras.ops.cond(calibrates, lambda: _amax_apart(x), lambda: keras.ops.zeros(()))

    def next_history(self, history: Any, amaxes: list[Any]) -> Any:
        known, steps = history[:, 1:2], history[:, -1:]
        # After the calibration the amaxes are 0.
        fixed = keras.ops.maximum(known, keras.ops.stack(amaxes)[:, None])
        return keras.ops.concatenate([keras.ops.zeros_like(fixed), fixed, next_step(steps)], axis=1)


def _amax_apart(x: Any) -> Any:
    # The barrier keeps a compiler from computing this in every step.
    return amax_of(backend.barrier([x], [])[0])
