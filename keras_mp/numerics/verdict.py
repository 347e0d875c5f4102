"""Rules for whether a layer fits a precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp.fp8.selection import reads_sparse
from keras_mp.numerics.ranges import Range
from keras_mp.precision.formats import BFLOAT16, E4M3, E5M2, FLOAT16, Format
from keras_mp.rebuild.walk import own_variables
from keras_mp.reporting import remedies

# Below this signal-to-noise ratio a tenth of the signal, by size, is noise: 10^(-20 dB / 20). Rounding alone leaves
# 53 dB in bfloat16 and 71 dB in float16, and sums and products of rounded operands about as much. Less than 20 dB is a
# result that moves, by its size, 40 times as far as bfloat16 rounds what it is computed from, and 350 times as far as
# float16 does: in bfloat16 a sine of 50, or the difference of 50.5 and 50.
LEAST_SQNR = 20.0
MOST_RESPONSE = 10 ** (-LEAST_SQNR / 20)
# 3 bits of mantissa give some 31 dB, 2 bits 25 dB (the test of keras_mp.fp8 measures the same). Less is a tensor whose
# values lie too far apart for one scale.
LEAST_SQNR_E4M3, LEAST_SQNR_E5M2 = 20.0, 15.0
# Layers that hand values on: what overflows in them shows in their output.
PASSING = (
    "Add Average Concatenate Cropping1D Cropping2D Cropping3D Dropout Flatten Identity InputLayer MaxPooling1D "
    "MaxPooling2D MaxPooling3D Maximum Minimum Permute RepeatVector Reshape SpatialDropout1D SpatialDropout2D "
    "SpatialDropout3D UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D "
    "GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GetItem Transpose"
).split()
_ELEMENTWISE = (keras.layers.Activation, keras.layers.ELU, keras.layers.LeakyReLU, keras.layers.ReLU)


class Verdict(NamedTuple):
    """Whether a layer fits a precision, and why."""

    ok: bool
    tensor: str  # the name of the tensor that decides: "input", "output", "kernel", "kernel gradient", ...
    reason: str  # a sentence
    remedy: str = ""
    tried: bool = True  # whether the layer could be run on what is rounded; where it could not, `ok` is False
    error: float = 0.0  # the size of what the tensor loses as a share of its own; infinite where values overflow


_FLOAT32 = f"give the layer {remedies.FLOAT32_LAYER}, or make its values smaller"


def float16(layer: keras.Operation, ranges: Mapping[str, Range], scale: float, response: float | str | None) -> Verdict:
    """The verdict on float16.

    A layer is unsafe in float16 if, run in it on the float32 inputs, it puts out infinity or NaN; or if, at the loss
    scale, less than 20 dB are left of its output or of its gradients; or of what it computes from rounded inputs.

    Args:
        ranges: the ranges of its tensors; gradients as they are without a loss scale.
        response: the response of the layer, of `keras_mp.numerics.response`; None where none can be measured.
    """
    overflow = _overflow(layer, ranges)
    if overflow is not None:
        return overflow
    ratio = ranges["output"].loss(FLOAT16).sqnr if "output" in ranges else math.nan
    if ratio < LEAST_SQNR:
        zeroed = ranges["output"].loss(FLOAT16).zeroed
        reason = f"{zeroed:.1%} of its outputs become zero, and it keeps only {ratio:.0f} dB"
        return Verdict(False, "output", reason, _FLOAT32, error=_noise(ratio))
    if (responding := _responding(layer, response, FLOAT16)) is not None:
        return responding
    gradients = {role: ranges[role] for role in ("output gradient", "kernel gradient") if role in ranges}
    for role, gradient in gradients.items():
        if not gradient.largest:
            continue
        if FLOAT16.overflows(gradient.largest * scale):
            reason = f"at a loss scale of {scale:g} its {role} overflows: it reaches {gradient.largest:.3g}"
            remedy = f"lower the loss scale, or give the layer {remedies.FLOAT32_LAYER}"
            return Verdict(False, role, reason, remedy, error=math.inf)
        ratio = gradient.loss(FLOAT16).sqnr
        if ratio < LEAST_SQNR:
            lost = gradient.loss(FLOAT16).zeroed
            reason = (
                f"at a loss scale of {scale:g}, the largest that other gradients allow, {lost:.1%} of its {role} "
                f"become zero, and it keeps only {max(ratio, 0):.0f} dB: it reaches only {gradient.largest:.3g}"
            )
            remedy = f"give the layer {remedies.FLOAT32_LAYER}, or weigh its part of the loss more"
            return Verdict(False, role, reason, remedy, error=_noise(ratio))
    for role, gradient in gradients.items():
        vanishing = gradient.share_vanishing
        if vanishing > 0.5:
            reason = (
                f"without a loss scale {vanishing:.1%} of its {role} become zero: it reaches {gradient.largest:.3g}"
            )
            remedy = f"scale the loss, by {scale:g} to begin with: {remedies.SCALE_LOSS}"
            return Verdict(True, role, reason, remedy, error=vanishing)
    return Verdict(True, "", "all of it fits")


def _overflow(layer: keras.Operation, ranges: Mapping[str, Range]) -> Verdict | None:
    """The tensor whose overflow in float16 shows in the output."""
    kernel = ranges.get("kernel")
    if kernel is not None and _too_large(kernel, FLOAT16) and any(v._autocast for v in own_variables(layer)):
        return _overflowing("kernel", kernel)
    scores = ranges.get("scores")
    if scores is not None and FLOAT16.overflows(scores.highest):
        return _overflowing("scores", scores)
    before = ranges.get("before activation")
    if before is not None and _too_large(before, FLOAT16) and not _survives(layer.activation, before):
        return _overflowing("before activation", before)
    if "output" in ranges and _too_large(ranges["output"], FLOAT16):
        return _overflowing("output", ranges["output"])
    given = ranges.get("input")
    if given is None or not _too_large(given, FLOAT16) or type(layer).__name__ in PASSING:
        return None
    if isinstance(layer, keras.layers.Layer) and not getattr(layer, "autocast", True):
        return None  # it reads its input as it is
    if isinstance(layer, _ELEMENTWISE):
        narrow = type(layer).from_config({**layer.get_config(), "dtype": "float16"})
        if _survives(narrow, given):
            return None
    if not isinstance(layer, keras.layers.Layer) and _survives(layer.call, given):
        return None
    return _overflowing("input", given)


def _overflowing(role: str, of: Range) -> Verdict:
    end = of.highest if of.highest >= -of.lowest else of.lowest
    share = of.loss(FLOAT16).overflow
    tensor = f"its {role}" if role != "before activation" else "the input of its activation"
    reason = f"{tensor} reaches {end:.3g}, past float16's {FLOAT16.max:g} ({share:.2g} of it)"
    return Verdict(False, role, reason, _FLOAT32, error=math.inf)


def _noise(sqnr: float) -> float:
    """The noise's size, as a share of the signal's."""
    return 10 ** (-sqnr / 20)


def _too_large(values: Range, format: Format) -> bool:
    return format.overflows(values.lowest) or format.overflows(values.highest)


def _survives(function: Any, values: Range) -> bool:
    """Whether a function of the extremes is finite in float16."""
    ends = np.array([[values.lowest, values.highest]], "float32")
    try:
        result = function(keras.ops.cast(ends, "float16"))
        return tuple(result.shape) == ends.shape and bool(np.isfinite(np.asarray(result, "float32")).all())
    except Exception:  # whatever an operation makes of a shape that it was not meant for
        return False


def _responding(layer: keras.Operation, response: float | str | None, format: Format) -> Verdict | None:
    """The verdict on a result that moves too far."""
    if isinstance(response, str):
        reason = f"it was not tried: in {format.name} its code fails: {response}"
        return Verdict(False, "output", reason, f"give the layer {remedies.FLOAT32_LAYER}", tried=False)
    if response is None or response <= MOST_RESPONSE:
        return None
    moved = f"is off by {response:.0%} of its size" if math.isfinite(response) else "is infinite or NaN"
    reason = f"with arguments and weights rounded to {format.name}, its result {moved}"
    remedy = f"give the layers that compute its arguments {remedies.FLOAT32_LAYER}"
    if isinstance(layer, keras.layers.Layer):
        remedy = f"give the layer {remedies.FLOAT32_LAYER}, and the layers that compute its arguments, too"
    return Verdict(False, "output", reason, remedy, error=response)


def bfloat16(layer: keras.Operation, ranges: Mapping[str, Range], response: float | str | None) -> Verdict:
    """The verdict on bfloat16; `response` as for float16."""
    for role, values in ranges.items():
        if _too_large(values, BFLOAT16):
            reason = f"its {role} reaches {values.largest:.3g}, past bfloat16's {BFLOAT16.max:.3g}"
            return Verdict(False, role, reason, error=math.inf)
    return _responding(layer, response, BFLOAT16) or Verdict(True, "", "all of it fits")


def fp8(layer: keras.Operation, ranges: Mapping[str, Range]) -> Verdict:
    """The verdict on FP8, E4M3 and for gradients E5M2, scaled."""
    if not isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return Verdict(False, "", "only Dense and EinsumDense compute in FP8")
    if layer.quantization_mode not in (None, "float8"):
        return Verdict(False, "", f"it is quantized to {layer.quantization_mode}")
    if reads_sparse(layer):
        reason = "it reads a sparse tensor, and both operands of an FP8 product are dense"
        return Verdict(False, "input", reason, "leave the layer in 16 bits")
    formats = (
        ("input", E4M3, LEAST_SQNR_E4M3),
        ("kernel", E4M3, LEAST_SQNR_E4M3),
        ("output gradient", E5M2, LEAST_SQNR_E5M2),
    )
    for role, format, least in formats:
        ratio = ranges[role].loss(format).sqnr if role in ranges else math.nan
        if ratio < least:
            reason = (
                f"its {role} keeps only {ratio:.0f} dB in {format.name}: its values lie too far apart for one scale"
            )
            return Verdict(False, role, reason, "leave the layer in 16 bits", error=_noise(ratio))
    return Verdict(True, "", "all of it fits")
