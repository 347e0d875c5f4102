"""The scaling recipes current, delayed, rowwise and static, and those that have a name. Docstrings are formulas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import keras

from keras_mp import backend
from keras_mp.fp8.int8_products import Int8Scaling
from keras_mp.fp8.mxfp8 import MXFP8Scaling
from keras_mp.fp8.scaling_recipe import (
    AMAX_RULES,
    HYBRID,
    Quantized,
    Recipe,
    RoleFormats,
    amax_of,
    check_role,
    next_step,
    over_parts,
)
from keras_mp.precision.formats import E4M3
from keras_mp.system.whole_number import whole_number


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class CurrentScaling(Recipe):
    """A scale per tensor, from the tensor itself. There is no state.

        amax  = max |x|
        scale = min(max of the format / amax, 2^126)        1 where amax is 0, infinite or NaN
        scale = 2^floor(log2 scale)                         with power_of_two
        x8    = cast(x . scale)                             x = x8 / scale

    The scale is float32 and finite. Where x holds an infinity or a NaN it is 1, and x8 holds a NaN there.

    Formula: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433), section 3.

    Args:
        format: the formats by role: `HYBRID` or "hybrid"; one format, such as `E4M3` or "E4M3", for all; a
            `RoleFormats`; or a dict from role to format.
        power_of_two: whether scales are rounded down to a power of two, so that scaling itself rounds nothing.

    Raises:
        ValueError: unknown format or role, or two roles in E5M2.
    """

    format: RoleFormats = HYBRID
    power_of_two: bool = False

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        # Of an empty batch, too.
        amax = keras.ops.cast(keras.ops.max(keras.ops.abs(x), initial=0), "float32")
        return self.scaled(x, role, over_parts(amax))


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """A scale per tensor, from its amaxes in the steps before: the tensor is read once, not twice.

        amax_t  = max |x_t|, 0 where that is not finite; over the calls, micro-batches and replicas of step t
        amax    = max(amax_t-1, ..., amax_t-H)              "max"
                = amax_t-1                                  "most_recent"
                = max |x_t|                                 where that is 0: the first step scales just in time
        scale_t = min(max of the format / (2^margin . amax), 2^126)         1 where amax is 0, infinite or NaN
        x8      = cast(x_t . scale_t)                       what exceeds the format saturates

    XLA's maximum for CPUs leaves NaNs out: there, the amax of a tensor with a NaN is that of the rest.

    A step of which nothing is applied (a skipped one, or a micro-batch that is only accumulated) leaves the amaxes as
    they are. They are saved with the layer.

    A layer that is not trainable keeps no amaxes and scales just in time. In inference the scales are those of the
    amaxes so far. Where a loss is scaled, the gradient's amaxes are those of the scaled loss: when the loss scale
    doubles, gradients above half the largest saturate until the next step, unless margin is 1 or more.

    Formula: Transformer Engine's DelayedScaling, and flax's fp8_ops, whose scale of step t is also made of the amaxes
    before t. Keras's float8 layers are one step staler.

    Args:
        margin: how many powers of two the largest known magnitude stays below the top of the format.
        amax_history_length: H, 1 or more.
        amax_compute: "max" or "most_recent".
        format: as of `CurrentScaling`.
        power_of_two: as of `CurrentScaling`.

    Raises:
        ValueError: margin is no whole number of 0 or more, amax_history_length no whole number of 1 or more, unknown
            amax_compute; or as `CurrentScaling`.
    """

    margin: int = 0
    amax_history_length: int = 16
    amax_compute: str = "max"
    format: RoleFormats = HYBRID
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("margin", 0), ("amax_history_length", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.amax_compute not in AMAX_RULES:
            raise ValueError(f"amax_compute={self.amax_compute!r} is unknown: use 'max' or 'most_recent'")

    @property
    def history_length(self) -> int:
        return self.amax_history_length

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        check_role(role)
        if history is None:
            return self.scaled(x, role, amax_of(x), self.margin)
        known = keras.ops.max(history) if self.amax_compute == "max" else history[0]
        # The barrier: a compiler that sees the same maximum in the history's next entry computes it first, in every
        # step, and then reads x a second time.
        amax = keras.ops.cond(known > 0, lambda: known, lambda: amax_of(backend.barrier([x], [])[0]))
        return self.scaled(x, role, amax, self.margin)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """A scale for each row of the inputs and each column of the kernel, from the tensors themselves. No state.

        amax  = max |x| along the axes that the product sums over
        scale = min(max of the format / amax, 2^126)        1 where amax is 0, infinite or NaN
        y     = (x8 . w8) / (sx of the row . sw of the column)

    An outlier costs the precision of its own row only. Scales must lie along axes that a product keeps, and the three
    products keep different ones, so each quantizes copies of its own: the gradient of the inputs takes a scale for each
    row of the gradient and each row of the kernel. The gradient of the kernel sums over the rows of the batch; it takes
    a scale for each column of the inputs, in a second FP8 copy that the forward pass makes and keeps, and for each
    column of the gradient. All three run in FP8. Where amaxes of rows are read in steps of their own this costs twice
    the quantization of `CurrentScaling`, and GPUs apply many scales in a kernel after the product.

    Formula: torchao, float8 training, recipe "rowwise", which has E4M3 for gradients as well.

    Args:
        format: as of `CurrentScaling`; E4M3 for all by default, since a row needs less range than a tensor.
        power_of_two: as of `CurrentScaling`.

    Raises:
        ValueError: as `CurrentScaling`.
    """

    format: RoleFormats = RoleFormats(E4M3, E4M3, E4M3)
    power_of_two: bool = False
    per_row: ClassVar[bool] = True

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        axes = (-1,) if axes is None else axes
        amax = keras.ops.cast(keras.ops.max(keras.ops.abs(x), axis=axes, keepdims=True, initial=0), "float32")
        return self.scaled(x, role, over_parts(amax, axes))


# The scaling recipe of FP8 products whose scales are calibrated in the first steps, and then stay.


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


# The scaling recipes that have a name.

RECIPES: dict[str, Callable[[], Recipe]] = {
    "current": CurrentScaling,
    "delayed": DelayedScaling,
    "static": StaticScaling,
    "rowwise": RowwiseScaling,
    "mxfp8": MXFP8Scaling,
    "int8": Int8Scaling,
    "int8_current": functools.partial(Int8Scaling, "current"),
}


def get_recipe(recipe: Any = None) -> Recipe:
    """Finds a scaling recipe.

    Args:
        recipe: a scaling recipe, its name ("current", "delayed", "static", "rowwise", "mxfp8", "int8" or
            "int8_current"), its serialized config, or None for `CurrentScaling()`.

    Returns:
        The scaling recipe.

    Raises:
        ValueError: it is none of these.
    """
    if recipe is None:
        return CurrentScaling()
    if isinstance(recipe, dict):
        recipe = keras.saving.deserialize_keras_object(recipe)
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]()
    known = ", ".join(repr(name) for name in RECIPES)
    raise ValueError(
        f"recipe={recipe!r} is unknown: use {known}, or a scaling recipe such as CurrentScaling(power_of_two=True)"
    )
