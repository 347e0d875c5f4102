"""Int8: the audit's ranges in inference, which operators cannot take it, and what is left of each layer's output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.export.export_report import Int8Layer
from keras_mp.export.litert_file import LiteRTFile, Operator
from keras_mp.numerics.audit import SAMPLE
from keras_mp.numerics.observe import is_float_tensor, layers_and_operations
from keras_mp.numerics.ranges import Range, sampled

# Records that are run at once.
BATCH = 64
# Beside those that reach a layer's range: for the tensors inside layers, whose ranges nothing here sees.
TYPICAL = 100
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


@dataclass
class Output:
    """What a layer put out on the calibration data.

    Attributes:
        path: the names that lead to the layer, joined with `/`.
        range: the range of all its values.
        lowest: the lowest value of each record.
        highest: the highest value of each record.
    """

    path: str
    range: Range = field(default_factory=Range)
    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)


def outputs_of(model: keras.Model, batch: Any) -> list[tuple[str, np.ndarray]]:
    """Outputs in inference of a model's parts, in their order.

    They are those of each layer and operation.

    Args:
        model: a model in float32.
        batch: a batch of the model's inputs, batch first.

    Returns:
        (path, array) pairs of the float outputs; what a layer passes on as it is appears once.
    """
    outputs: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}  # kept alive, so that no other gets the id

    def wrap(path: str, layer: keras.layers.Layer, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.update((id(x), x) for x in keras.tree.flatten((args, kwargs)))
            result = function(*args, **kwargs)
            outputs.extend((path, x) for x in keras.tree.flatten(result) if id(x) not in seen and is_float_tensor(x))
            seen.update((id(x), x) for x in keras.tree.flatten(result))
            return result

        return call

    everything = layers_and_operations(model)
    inside = tuple(f"{path}/" for path, layer in everything.items() if isinstance(layer, keras.layers.RNN))
    # A recurrent layer's cell puts out one step of what the layer does, and a model what its last layer does.
    whole = [
        (path, layer)
        for path, layer in everything.items()
        if not path.startswith(inside) and not isinstance(layer, keras.Model)
    ]
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    with wrapped_methods(whole, ["call"], wrap), backend.full_float32():
        model(inputs, training=False)
    return [(path, keras.ops.convert_to_numpy(x)) for path, x in outputs]


def observe(model: keras.Model, inputs: Any) -> list[Output]:
    """Finds the range of each layer's output, in inference.

    It is kept as by `keras_mp.audit`. An audit runs training steps: there, batch normalization takes the batch's
    statistics, dropout scales what it leaves, and augmentation moves the images. A served model does none of this, so
    its ranges are others.

    Args:
        model: a model in float32.
        inputs: the whole calibration data, in the structure of the model's inputs, batch first.

    Returns:
        An `Output` for each float output of each call of a layer.
    """
    observed: list[Output] = []
    for start in range(0, len(keras.tree.flatten(inputs)[0]), BATCH):
        batch = keras.tree.map_structure(lambda x, start=start: x[start : start + BATCH], inputs)
        outputs = outputs_of(model, batch)
        observed = observed or [Output(path) for path, _ in outputs]
        records = len(keras.tree.flatten(batch)[0])
        for output, (_, x) in zip(observed, outputs, strict=True):
            if x.size == 0:
                continue
            ends = (float(x.min()), float(x.max()))
            output.range.update(sampled(x, SAMPLE, np.ravel), size=x.size, extremes=ends)
            # What has no place for each record belongs to all of them.
            per_record = x.reshape(records, -1) if x.shape[:1] == (records,) else np.tile(ends, (records, 1))
            output.lowest += per_record.min(axis=1).tolist()
            output.highest += per_record.max(axis=1).tolist()
    return observed


def chosen(outputs: list[Output], records: int) -> list[int]:
    """Chooses records that reach the ends of layers' ranges.

    And `TYPICAL` others, to calibrate on.

    Returns:
        Their places, in order. A quantizer that looks at these alone sees the range that all of them have.
    """
    extreme = {int(np.argmin(output.lowest)) for output in outputs if output.lowest}
    extreme |= {int(np.argmax(output.highest)) for output in outputs if output.highest}
    return sorted(extreme | set(spread(records, TYPICAL)))


def spread(records: int, most: int) -> list[int]:
    """A number of places at most, evenly spread over all."""
    return sorted(set(np.linspace(0, records - 1, min(records, most)).round().astype(int).tolist()))


def integer_sqnr(range: Range, bits: int = 8) -> float:
    """Computes the SQNR in dB of integers in a range.

    If the errors are uniform, it is 10 log10(12 mean(x^2) / step^2). The step of 8 bits is (highest - lowest) / 255,
    with zero in the range, and that of 16 the largest magnitude / 32767, as LiteRT's quantization specification has it.
    Source: Bennett, "Spectra of quantized signals", 1948, for the noise step^2 / 12.

    Returns:
        Infinite for a range of zeros.
    """
    high, low = max(range.highest, 0.0), max(-range.lowest, 0.0)
    step = (high + low) / 255 if bits == 8 else max(high, low) / 32767
    return 10 * math.log10(12 * range.mean_square / step**2) if step > 0 and range.mean_square > 0 else math.inf


def sqnr(actual: np.ndarray, expected: np.ndarray) -> float:
    """Computes a signal to noise ratio in dB.

    It is 10 log10(sum expected^2 / sum (actual - expected)^2).

    Returns:
        Infinite where all are equal; minus infinity where one is not finite.
    """
    expected = expected.astype("float64").ravel()
    signal, noise = np.sum(expected**2), np.sum((actual.astype("float64").ravel() - expected) ** 2)
    if not noise:
        return math.inf
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def stays_float(file: LiteRTFile, feed: Mapping[str, np.ndarray], bits: int = 8) -> list[str]:
    """Names outputs of operators that integers would break."""
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
        elif operator.kind in STAYS_FLOAT and bits == 8:  # XNNPACK has no kernels of int16
            kept.append(operator)
    return [tensors[place].name for operator in kept for place in operator.outputs]


def layers(
    outputs: list[Output],
    expected: list[tuple[str, np.ndarray]],
    in_float: LiteRTFile,
    in_integers: LiteRTFile,
    feed: Mapping[str, np.ndarray],
    bits: int = 8,
) -> tuple[Int8Layer, ...]:
    """Compares layers' outputs with the nearest tensors of a file.

    By its values, because the converter gives fused operators names of its own. A layer whose output is not in the
    float file was fused with the next one.
    """
    there, quantized = _activations(in_float, feed), _activations(in_integers, feed)
    compared = []
    for output, (_, x) in zip(outputs, expected, strict=True):
        if x.size == 0:
            continue
        row = Int8Layer(output.path, output.range.lowest, output.range.highest, integer_sqnr(output.range, bits))
        close = [
            (sqnr(activation.values, x), activation) for activation in quantized if activation.values.size == x.size
        ]
        is_there = any(activation.values.size == x.size and sqnr(activation.values, x) > SAME for activation in there)
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
    """The values of a file's tensors, and their integers' ranges."""
    activations = []
    for place, x in file.values(feed).items():
        tensor = file.graphs[0][0][place]
        # What is made float32 again at the end is looked at before.
        if tensor.constant or tensor.made_by == "DEQUANTIZE":
            continue
        if x.dtype == np.float32:
            activations.append(_Activation(x, None))
        elif x.dtype in (np.int8, np.int16) and tensor.scales:
            scale, zero = tensor.scales[0], tensor.zero_points[0]
            ends = (scale * (np.iinfo(x.dtype).min - zero), scale * (np.iinfo(x.dtype).max - zero))
            activations.append(_Activation((x.astype("float32") - zero) * scale, ends))
    return activations
