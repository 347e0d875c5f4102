"""The scaling recipe of INT8 products: delayed, static and current scales, and gradients rounded stochastically."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import keras

from keras_mp import backend
from keras_mp.fp8.roles import HYBRID, RoleFormats, check_role
from keras_mp.fp8.scaling import AMAX_RULES
from keras_mp.fp8.scaling_recipe import Quantized, Recipe
from keras_mp.fp8.step_count import next_step
from keras_mp.fp8.whole_amax import over_parts
from keras_mp.loss_scaling.stochastic_rounding import random_bits
from keras_mp.precision.formats import scale_to
from keras_mp.system.whole_number import whole_number

TOP = 127
"""The largest integer; -128 is left out, so that the range is symmetric."""

MOST_TERMS = (2**31 - 1) // TOP**2
"""So many products of two integers are sure to have a sum within INT32."""

SCALES = ("delayed", "static", "current")
KERNEL_GRADIENTS = ("compute", "int8")

_FLOAT32_MAGNITUDE, _FLOAT32_INFINITY = 0x7FFFFFFF, 0x7F800000


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Scaling(Recipe):
    """INT8 instead of FP8: forward product and input gradient are INT8 products with INT32 sums.

        scale = min(127 / (2^margin . amax), 2^126)         1 where amax is 0, infinite or NaN
        x8    = round(clip(x . scale, -127, 127))           inputs and kernel: to the nearest, ties to even
        g8    = floor(clip(g . scale, -127, 127) + u)       gradients: stochastically, 0 < u < 1

        y             = float32(x8 . w8) / (sx sw)          rounded to the result's dtype
        gradient of x = float32(g8 . w8^T) / (sg sw)
        gradient of w = x^T . g                             in the compute dtype with float32 sums: "compute"
                      = float32(x8^T . g8) / (sx sg)        "int8"

    u = (k + 1/2) / 2^16, where k are the 16 high bits of a hash of seed, layer, step and the element's place in the
    whole tensor: a run that goes on after a restart rounds as one that was not stopped, and shards as the whole. Calls
    of one layer in one step, micro-batches of one update and replicas share the words. The layer counts by its path: of
    a model that is built a second time in one process, Keras numbers the layers on, unless they and the model have
    names.

    The amax is by `scales`:

        "delayed"   the largest of the amax_history_length steps before ("max"), or that of the last step
                    ("most_recent"); in the first step that of the tensor itself, as in `DelayedScaling`
        "static"    in the first calibration_steps steps the largest so far, this step's included; then fixed
        "current"   of each row of the inputs and of each column of the kernel, from the tensors themselves. As in
                    `RowwiseScaling`, each product has copies of its own, along the axes that it sums over

    Integers have no NaN: where a tensor holds an infinity or a NaN, the products of its integers are multiplied by NaN,
    the whole product with a scale a tensor, and the row or column with "current". So loss scaling sees an overflow.

    A product that sums over more than 133,144 terms can exceed INT32. Where the number is known when the program is
    traced, such a product has operands of the compute dtype; where it is not (on TensorFlow, the batch size), a
    kernel gradient of more rows is NaN.

    Static scales of gradients are for losses that are not scaled: a loss scale that grows after the calibration
    saturates the gradients.

    Formula: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018 (arXiv:1712.05877), symmetric; the kernel gradient in 16 bits as in Google's Qwix and torchao's
    INT8 training.

    Args:
        scales: "delayed", "static" or "current".
        kernel_gradient: "compute" or "int8".
        margin: how many powers of two the known amax stays below 127, with "delayed" and "static".
        amax_history_length: of "delayed", 1 or more.
        amax_compute: of "delayed", "max" or "most_recent".
        calibration_steps: of "static", 1 or more.
        seed: of the stochastic rounding.

    Raises:
        ValueError: an argument is none of these.
    """

    scales: str = "delayed"
    kernel_gradient: str = "compute"
    margin: int = 0
    amax_history_length: int = 16
    amax_compute: str = "max"
    calibration_steps: int = 16
    seed: int = 0
    # Of the base, which FP8 recipes choose.
    format: RoleFormats = dataclasses.field(init=False, default=HYBRID)
    power_of_two: bool = dataclasses.field(init=False, default=False)
    counts_steps: ClassVar[bool] = True
    operands: ClassVar[str] = "INT8"

    def __post_init__(self) -> None:
        for name, least in (("margin", 0), ("amax_history_length", 1), ("calibration_steps", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name, known in (
            ("scales", SCALES),
            ("kernel_gradient", KERNEL_GRADIENTS),
            ("amax_compute", AMAX_RULES),
        ):
            if getattr(self, name) not in known:
                listed = " or ".join(map(repr, known))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use {listed}")
        object.__setattr__(self, "per_row", self.scales == "current")

    @property
    def is_static(self) -> bool:
        return self.scales == "static"

    @property
    def history_length(self) -> int:
        # A static amax stands in the second place: the first is added up where calls meet in one slot.
        return {"delayed": self.amax_history_length, "static": 2, "current": 0}[self.scales]

    def get_config(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def quantize(
        self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None, variable: int = 0
    ) -> Quantized:
        """Scales a tensor into INT8.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient"; the last is rounded stochastically.
            axes: those that the product sums over; with "current" the scale is one for all along them.
            history: float32 of shape (history_length + 1,), of the role; None for a first step.
            variable: tells tensors apart that are rounded in one step.

        Returns:
            int8 values and the float32 scale, which is NaN where x, or the row of it, is not finite.

        Raises:
            ValueError: there is no such role.
        """
        check_role(role)
        now = magnitude(x, ((-1,) if axes is None else axes) if self.per_row else None)
        scale = scale_to(TOP * 2.0 ** (0 if self.per_row else -self.margin), self._amax(x, now, history))
        scaled = keras.ops.clip(keras.ops.cast(x, "float32") * scale, -TOP, TOP)
        if role == "gradient":
            step = keras.ops.zeros(()) if history is None else history[-1]
            bits = random_bits(keras.ops.shape(x), self.seed, keras.ops.cast(step, "int32"), variable)
            rounded = keras.ops.floor(scaled + _fraction(bits))
        else:
            rounded = keras.ops.round(scaled)
        scale = keras.ops.where(keras.ops.isfinite(now), scale, float("nan"))
        return Quantized(keras.ops.cast(rounded, "int8"), scale)

    def next_history(self, history: Any, amaxes: list[Any]) -> Any:
        """The history after a step.

        Args:
            history: float32 of shape (3, history_length + 1).
            amaxes: float32 of shape (), by role; of no use with "current".

        Returns:
            float32 of that shape.
        """
        known, steps = history[:, :-1], history[:, -1:]
        following = next_step(steps)
        if self.per_row:
            return following
        now = keras.ops.stack([keras.ops.where(keras.ops.isfinite(amax), amax, 0.0) for amax in amaxes])[:, None]
        if self.is_static:
            calibrating = steps < self.calibration_steps
            fixed = keras.ops.where(calibrating, keras.ops.maximum(known[:, 1:], now), known[:, 1:])
            return keras.ops.concatenate([keras.ops.zeros_like(fixed), fixed, following], axis=1)
        return keras.ops.concatenate([now, known[:, :-1], following], axis=1)

    def _amax(self, x: Any, now: Any, history: Any) -> Any:
        """The magnitude to scale by."""
        if history is None or self.per_row:
            return now

        def just_in_time() -> Any:
            # As in DelayedScaling: the barrier keeps a compiler from computing this in every step.
            return _finite(magnitude(backend.barrier([x], [])[0]))

        if self.is_static:
            known = history[1]
            calibrating = keras.ops.logical_or(history[-1] < self.calibration_steps, known <= 0)
            return keras.ops.cond(calibrating, lambda: keras.ops.maximum(known, just_in_time()), lambda: known)
        known = keras.ops.max(history[:-1]) if self.amax_compute == "max" else history[0]
        return keras.ops.cond(known > 0, lambda: known, just_in_time)


def magnitude(x: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude of a tensor, or along some axes, which then stay with length 1: float32.

    Infinite where the tensor is not finite, on all platforms: a compiler's maximum of floats may leave NaNs out, and so
    their bits say where they are. The maximum itself is of floats, because a compiler for TPUs finds that in the kernel
    that also rounds the tensor, and a maximum of integers in one of its own.
    """
    x = keras.ops.cast(x, "float32")
    is_finite = keras.ops.bitwise_and(backend.bitcast(x, "int32"), _FLOAT32_MAGNITUDE) < _FLOAT32_INFINITY
    magnitudes = keras.ops.where(is_finite, keras.ops.abs(x), float("inf"))
    return over_parts(keras.ops.max(magnitudes, axis=axes, keepdims=axes is not None, initial=0), axes)


def _finite(amax: Any) -> Any:
    return keras.ops.where(keras.ops.isfinite(amax), amax, keras.ops.zeros_like(amax))


def _fraction(bits: Any) -> Any:
    """Of each word a number between 0 and 1 whose mean is 1/2: added to less than 128, it leaves an integer's floor."""
    high = keras.ops.right_shift(bits, keras.ops.convert_to_tensor(16, "uint32"))
    return keras.ops.cast(keras.ops.cast(high, "int32"), "float32") * 2.0**-16 + 2.0**-17
