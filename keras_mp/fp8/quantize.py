"""Tensors in 8 bits, scaled by tensor or row."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.fp8.scaling import ROLES, Scaling, Scalings
from keras_mp.optimizer.stochastic_rounding import random_bits
from keras_mp.precision import formats

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000  # of a float32


class Quantized(NamedTuple):
    """A tensor in 8 bits, or in 16 and unscaled."""

    values: Any  # x . scale, rounded to the format
    scale: Any  # float32, of shape (), or of one that broadcasts to that of values


class Known(NamedTuple):
    """What updates before tell of a role's tensors."""

    amaxes: Any  # float32 of shape (kept,), the newest first; of static scales the amax stands second
    steps: Any  # float32 of shape (), the number of updates; None where it is not counted


def known_of(history: Any, role: str, scalings: Scalings) -> Known | None:
    """Reads what is known of a role, or None."""
    if history is None:
        return None
    row = history[ROLES.index(role)]
    return Known(row[: scalings.kept], row[-1] if scalings.counts else None)


def quantize(
    x: Any,
    scaling: Scaling,
    axes: tuple[int, ...] | None = None,
    known: Known | None = None,
    variable: int = 0,
    part: Any = None,
) -> Quantized:
    """Scales a tensor into its format and rounds it.

    Args:
        axes: the axes that the product sums over, of which a row has one scale; by default the last.
        known: the amaxes and the step from the updates before; None for a first one.
        variable: a number that tells tensors apart that are rounded stochastically in one update.
        part: the way in which the whole is made (`backend.part_of`), where x is a part; else None.

    Returns:
        The values and the scale. Where x is not finite, so are values of FP8, and the scale of INT8 is NaN.
    """
    along = None
    if scaling.granularity == "row":
        along = (-1,) if axes is None else axes
    of_itself = known is None or scaling.source == "current"
    now = magnitude(x, scaling, along, part) if of_itself or not scaling.format.has_nan else None
    amax = now if of_itself else _amax(x, scaling, known, part)
    top = scaling.format.max * 2.0**-scaling.margin
    scale = formats.scale_to(top, amax, scaling.scale == "power_of_two")
    bits = rounding_bits(keras.ops.shape(x), scaling, known, variable)
    values = formats.cast(keras.ops.cast(x, "float32") * scale, scaling.format, bits)
    if not scaling.format.has_nan:
        scale = keras.ops.where(keras.ops.isfinite(now), scale, float("nan"))
    return Quantized(values, scale)


def rounding_bits(shape: Any, scaling: Scaling, known: Known | None, variable: int) -> Any:
    """Words of stochastic rounding, uint32; None for the nearest."""
    if scaling.rounding == "nearest":
        return None
    steps = keras.ops.zeros(()) if known is None or known.steps is None else known.steps
    return random_bits(tuple(shape), scaling.seed, keras.ops.cast(steps, "int32"), variable)


def _amax(x: Any, scaling: Scaling, known: Known | None, part: Any) -> Any:
    """Magnitude to scale a tensor by, from what is known."""

    def just_in_time() -> Any:
        # The barrier: a compiler that sees the same maximum elsewhere computes it in every step, and reads x twice.
        return _finite(magnitude(backend.barrier([x], [])[0], scaling, None, part))

    assert known is not None
    if scaling.source == "static":
        before = known.amaxes[1]
        looks = keras.ops.logical_or(known.steps < scaling.history, before <= 0)
        return keras.ops.cond(looks, lambda: keras.ops.maximum(before, just_in_time()), lambda: before)
    before = keras.ops.max(known.amaxes[: scaling.history])
    return keras.ops.cond(before > 0, lambda: before, just_in_time)


def magnitude(x: Any, scaling: Scaling, axes: tuple[int, ...] | None = None, part: Any = None) -> Any:
    """Largest magnitude of a tensor, or along axes, kept.

    XLA's maximum for CPUs leaves NaNs out. FP8 keeps a NaN in its values; for a format without one the magnitude is
    infinite where x is not finite, by the bits of its numbers. The maximum itself is of floats, because a compiler for
    TPUs finds that in the kernel that also rounds the tensor, and a maximum of integers in one of its own.
    """
    # Of float32 values, as they are scaled: so one pass can do both.
    x = keras.ops.cast(x, "float32")
    magnitudes = keras.ops.abs(x)
    if not scaling.format.has_nan:
        is_finite = keras.ops.bitwise_and(backend.bitcast(x, "int32"), _MAGNITUDE) < _INFINITY
        magnitudes = keras.ops.where(is_finite, magnitudes, float("inf"))
    amax = keras.ops.max(magnitudes, axis=axes, keepdims=axes is not None, initial=0)  # of an empty batch, too
    return amax if part is None or not lies_in(part, axes) else part.largest(amax)


def lies_in(part: Any, axes: tuple[int, ...] | None) -> bool:
    """Whether the split axis is among these; None is all."""
    return axes is None or part.axis in [axis % len(part.shape) for axis in axes]


def _finite(amax: Any) -> Any:
    return keras.ops.where(keras.ops.isfinite(amax), amax, keras.ops.zeros_like(amax))


# From update to update.

# Float32 counts each update up to here; what follows counts in the upper half again, so that no two neighbours are
# equal.
_STEPS = 2.0**24


def known_magnitude(x: Any, scaling: Scaling, known: Known) -> Any:
    """Magnitude that becomes known; 0 of what is not finite.

    After the calibration of static scales it is 0, and x is not read.
    """
    if scaling.source != "static":
        return _finite(magnitude(x, scaling))
    apart = backend.barrier([x], [])[0]
    calibrates = known.steps < scaling.history
    return keras.ops.cond(calibrates, lambda: _finite(magnitude(apart, scaling)), lambda: keras.ops.zeros(()))


def next_history(history: Any, scalings: Scalings, amaxes: list[Any]) -> Any:
    """What is known after an update, from `known_magnitude`s by role."""
    columns = []
    if scalings.kept:
        rows = []
        for row, (role, amax) in enumerate(zip(ROLES, amaxes, strict=True)):
            before = history[row, : scalings.kept]
            if any(scaling.source == "static" for scaling in scalings.of(role)):
                fixed = keras.ops.maximum(before[1], amax)
                rest = keras.ops.zeros_like(before[2:])
                rows.append(keras.ops.concatenate([keras.ops.stack([keras.ops.zeros_like(fixed), fixed]), rest]))
            else:
                rows.append(keras.ops.concatenate([keras.ops.reshape(amax, (1,)), before[:-1]]))
        columns.append(keras.ops.stack(rows))
    if scalings.counts:
        columns.append(next_step(history[:, -1:]))
    return keras.ops.concatenate(columns, axis=1)


def next_step(steps: Any) -> Any:
    """Counts one more; 2^23 comes after 2^24 - 1."""
    following = steps + 1.0
    return keras.ops.where(following < _STEPS, following, _STEPS / 2)


# Kernels of which each device has a part: a part is scaled as the whole would be, and what is gathered are its codes.
#
# A part comes from `backend.part_of`. Where a kernel is whole it is None, and nothing here does anything.


def read_kernel(variable: Any, scalings: Scalings) -> tuple[Any, Any]:
    """Reads a kernel, or this device's part and its join.

    Where scalings cannot scale a part, it is the whole, gathered as that of any layer.
    """
    return backend.part_of(variable) if scalings.takes_parts else (backend.as_tensor(variable), None)


def gather_parts(quantized: Quantized, part: Any, axes: tuple[int, ...] | None = None) -> Quantized:
    """Gathers a tensor of which a part was quantized.

    There is one scale along the axes; None stands for all.
    """
    if part is None:
        return quantized
    scale = quantized.scale
    if len(scale.shape) and not lies_in(part, axes):
        scale = part.joined(scale)
    return Quantized(part.joined(quantized.values), scale)
