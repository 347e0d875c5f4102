"""What int8 does to a model: which operators cannot take it, and what is left of each layer's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from keras_mp.export import calibration
from keras_mp.export.export_report import Int8Layer
from keras_mp.export.litert_file import LiteRTFile, Operator

# XNNPACK, which LiteRT runs on CPUs by default, takes the zero point of the second operand of an int8 product of two
# activations for 0: with TensorFlow 2.21 a product is off by a fifth and more (tests/export/test_int8.py).
STAYS_FLOAT = ("BATCH_MATMUL",)
# A step of int8 is a 255th of the range, so that beside the -1e9 of an attention mask every score is 0.
HUGE = 1e6
# Operators whose inputs and outputs have one scale, so that a huge range reaches what is before them, too.
# Source: LiteRT's 8-bit quantization specification, the operators with a restriction on their scales.
ONE_SCALE = frozenset(
    "AVERAGE_POOL_2D BROADCAST_TO CONCATENATION EXPAND_DIMS GATHER MAXIMUM MAX_POOL_2D MINIMUM PACK PAD PADV2 "
    "REDUCE_MAX REDUCE_MIN RESHAPE REVERSE_V2 SELECT SELECT_V2 SLICE SPLIT SPLIT_V SQUEEZE STRIDED_SLICE TILE "
    "TRANSPOSE UNPACK".split()
)
# A float file's tensor is a layer's output if they differ by less: the rest of float32's 150 dB is rounding.
SAME = 60.0


def stays_float(file: LiteRTFile, feed: Mapping[str, np.ndarray]) -> list[str]:
    """The operators of a float file that int8 would break, by the names of their outputs.

    Args:
        file: in float32.
        feed: a batch, by name.
    """
    floats = {place: x for place, x in file.values(feed).items() if x.dtype == np.float32 and x.size}
    huge = {place for place, x in floats.items() if np.abs(x).max() >= HUGE}
    tensors, operators = file.graphs[0]
    makers = {place: operator for operator in operators for place in operator.outputs}
    kept: list[Operator] = []

    def keep(operator: Operator) -> None:
        if operator in kept:
            return
        kept.append(operator)
        if operator.kind in ONE_SCALE:
            for place in operator.inputs:
                if place in floats and place in makers:
                    keep(makers[place])

    for operator in operators:
        if huge & {*operator.inputs, *operator.outputs}:
            keep(operator)
        elif operator.kind in STAYS_FLOAT:
            kept.append(operator)
    return [tensors[place].name for operator in kept for place in operator.outputs]


def layers(
    outputs: list[calibration.Output],
    expected: list[tuple[str, np.ndarray]],
    in_float: LiteRTFile,
    in_int8: LiteRTFile,
    feed: Mapping[str, np.ndarray],
) -> tuple[Int8Layer, ...]:
    """Compares each layer's output with the tensor of a file that comes closest to it.

    By its values, because the converter gives fused operators names of its own. A layer whose output is not in the
    float file was fused with the next one.

    Args:
        outputs: of `calibration.observe`.
        expected: of `calibration.outputs_of`, on the batch feed.
        in_float: the file in float32.
        in_int8: the file in int8.
        feed: a batch, by name.
    """
    there, quantized = _activations(in_float, feed), _activations(in_int8, feed)
    compared = []
    for output, (_, x) in zip(outputs, expected, strict=True):
        if x.size == 0:
            continue
        row = Int8Layer(output.path, output.range.lowest, output.range.highest, calibration.int8_sqnr(output.range))
        close = [
            (calibration.sqnr(activation.values, x), activation)
            for activation in quantized
            if activation.values.size == x.size
        ]
        is_there = any(
            activation.values.size == x.size and calibration.sqnr(activation.values, x) > SAME for activation in there
        )
        if close and is_there:
            measured, nearest = max(close, key=lambda pair: pair[0])
            low, high = nearest.range or (None, None)
            row = row._replace(file_lowest=low, file_highest=high, measured=measured)
        compared.append(row)
    return tuple(compared)


class _Activation(NamedTuple):
    values: np.ndarray
    range: tuple[float, float] | None


def _activations(file: LiteRTFile, feed: Mapping[str, np.ndarray]) -> list[_Activation]:
    """The values, and the int8 ranges, of what a file computes on a batch."""
    activations = []
    for place, x in file.values(feed).items():
        tensor = file.graphs[0][0][place]
        # What is made float32 again at the end is looked at before.
        if tensor.constant or tensor.made_by == "DEQUANTIZE":
            continue
        if x.dtype == np.float32:
            activations.append(_Activation(x, None))
        elif x.dtype == np.int8 and tensor.scales:
            scale, zero = tensor.scales[0], tensor.zero_points[0]
            ends = (scale * (-128 - zero), scale * (127 - zero))
            activations.append(_Activation((x.astype("float32") - zero) * scale, ends))
    return activations
