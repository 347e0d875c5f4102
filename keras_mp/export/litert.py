"""Writes a LiteRT file, in float32 or integers."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp.conversion.to_float32 import to_float32
from keras_mp.export.deployment import INT8_STEPS, Signature, check, compared, counted, float32_saved_model
from keras_mp.export.export_report import DeploymentReport
from keras_mp.export.litert_file import LiteRTFile, Operator
from keras_mp.export.verification import ExportError
from keras_mp.qat.litert_ranges import BITS, settle, trained_for
from keras_mp.rebuild.model import rebuild
from keras_mp.rebuild.walk import Config, RebuildError, layers_by_path
from keras_mp.system.argument_checks import one_of
from keras_mp.system.atomic_write import atomic_write, parents_made
from keras_mp.system.quiet_import import quiet_stderr

# Records that tell which operators have huge values.
PROBE = 32
# Records that are scored at once.
BATCH = 64
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


def export_litert(
    model: keras.Model,
    path: str | os.PathLike[str],
    verify: Any = None,
    *,
    quantize: str | None = None,
    calibrate: Any = None,
    integer_io: bool = False,
    evaluate: tuple[Any, Any] | None = None,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> DeploymentReport:
    """Exports a model as a LiteRT (TensorFlow Lite) file.

    It may have been trained in any precision on any backend. `export_float32` writes and checks a SavedModel, and
    TensorFlow's converter converts it, using only LiteRT's own operators. Without `calibrate` it is in float32: no
    tensor of it may be a 16- or 8-bit float or quantized.

    With `calibrate` its weights are int8, and its activations too, or int16, in ranges that the converter takes from
    all of `calibrate`. A model that was trained by `convert(model, "qat_litert")` brings its ranges: its file computes
    what it computes, up to rounding, and is compared with it.

    Recurrent layers are unrolled: the converter cannot take Keras's loops with an unknown batch size.

    Args:
        model: a built Keras model.
        path: a file that does not exist yet, or is replaced with `overwrite`.
        verify: a batch of inputs, as for `export_float32`. When given, the file is loaded again, run with LiteRT's
            interpreter, also in batches of 1 and 7, and compared with the model run in float32.
        quantize: "int8", or "int16x8" for int16 activations with int8 weights; by default what the model was trained
            for, or "int8" with calibrate.
        calibrate: inputs in the structure of the model's, batch first, like those that will be served: hundreds.
        integer_io: whether the inputs and outputs of a quantized file are integers, as microcontrollers need them, with
            the scales that the file gives them, and not float32. Those of an operator that stays in float32 are float32
            all the same, and the report's notes name them.
        evaluate: inputs and targets (x, y), on which the compiled loss and metrics of the model and of the file are
            reported.
        tolerance: the largest difference that `verify` allows of a float32 file, relative to max(1, the largest
            magnitude of each output). The difference of a quantized file is reported, whatever it is.
        overwrite: whether an existing file is replaced, after the new one was checked.

    Returns:
        A `DeploymentReport`.

    Raises:
        ImportError: If TensorFlow is not installed.
        ValueError: If quantize is unknown, or integer_io is True and nothing is quantized.
        ExportError: As for `export_float32`; also if LiteRT has no operator for an operation of a layer, if quantize
            comes without calibrate and the model was not trained for it, if it was trained for another or has not
            trained yet, if calibrate does not fit the model or is not finite, or if evaluate comes with a model that
            is not compiled.
    """
    path = Path(path)
    trained = trained_for(model) if isinstance(model, keras.Model) else None
    if quantize is not None:
        one_of("quantize", quantize, BITS)
    if trained is not None and (calibrate is not None or quantize not in (None, trained)):
        raise ExportError(
            f"model {model.name!r} was trained for quantize={trained!r}, with ranges of its own: leave quantize and "
            "calibrate out, or call revert(model, 'convert') before"
        )
    quantize = trained or quantize or (None if calibrate is None else "int8")
    if integer_io and quantize is None:
        raise ValueError("integer_io=True is for a quantized file: give quantize='int8', and calibrate")
    check(model, path, verify, ["tensorflow"], overwrite)
    if quantize is not None and calibrate is None and trained is None:
        raise ExportError(
            f"quantize={quantize!r} needs calibrate, hundreds of inputs like those that will be served, on which the "
            "ranges of activations are measured; or convert(model, 'qat_litert') and some steps of training, which "
            "find ranges of their own"
        )
    if evaluate is not None and not model.compiled:
        raise ExportError(f"evaluate needs the loss of model {model.name!r}: compile it")
    flat = unrolled(model, verify)
    source = flat if trained is None else _rounded(flat, verify)
    # Where a sum is rounded otherwise in float32, a value can fall on the next step.
    proof = (verify, tolerance) if trained is None else (None, INT8_STEPS)
    try:
        with float32_saved_model(source, *proof) as (folder, signature, notes):
            if calibrate is not None:
                file = _calibrated(folder, signature, model, calibrate, str(quantize))
            else:
                file = _converted(folder, model, quantize)
    except ValueError as error:
        if flat is not model and "Cannot unroll" in str(error):
            raise ExportError(
                f"the recurrent layers of model {model.name!r} cannot be unrolled, which LiteRT needs: give its Input "
                "a fixed number of steps"
            ) from error
        raise
    if trained == "int16x8":
        try:
            file = file.with_wide_biases()
        except OverflowError as error:
            raise ExportError(f"model {model.name!r} was not exported for {trained!r}: {error}") from error
    if integer_io:
        file = file.with_integer_io(BITS[quantize])  # type: ignore[index]
        still = ", ".join(file.float_io())
        notes += (f"{still} stay float32, because an operator in float32 reads or writes them",) if still else ()
    remaining = file.low_precision(quantized=quantize is not None)
    if remaining:
        raise ExportError(f"model {model.name!r} was not exported: low precision would be left in {remaining[:5]}")
    report = DeploymentReport(
        path,
        "LiteRT" if quantize is None else f"LiteRT {quantize}",
        len(file.content),
        counted(file.operators()),
        float_operators={} if quantize is None else counted(file.float_operators()),
        calibrated_on=0 if calibrate is None else len(keras.tree.flatten(calibrate)[0]),
        notes=notes,
    )
    with parents_made(path), atomic_write(path) as partial:
        partial.write_bytes(file.content)
        run = LiteRTFile(partial.read_bytes()).runner(signature.outputs)
        if verify is not None:
            largest = tolerance if quantize is None else math.inf
            report = compared(report, run, signature, model, verify, largest, file.output_scales(signature.outputs))
        if evaluate is not None:
            before, after = _scores(run, signature, model, *evaluate)
            report = dataclasses.replace(report, model_scores=before, file_scores=after)
    return report


def unrolled(model: keras.Model, sample: Any = None) -> Any:
    """Unrolls recurrent layers; without any, returns the model."""
    if all(layer.unroll for layer in layers_by_path(model).values() if isinstance(layer, keras.layers.RNN)):
        return model

    def unroll(node: Config, layer: keras.layers.Layer) -> Config:
        if not isinstance(layer, keras.layers.RNN) or "unroll" not in node.get("config", {}):
            return node
        return {**node, "config": {**node["config"], "unroll": True}}

    rebuilt, unreached, _ = rebuild(model, unroll, sample=sample, carry_compile=False)
    if unreached:
        raise RebuildError(f"model {model.name!r} could not be unrolled: {'; '.join(unreached)}")
    return rebuilt


def _converted(
    folder: Path,
    model: keras.Model,
    quantize: str | None = None,
    feeds: Callable[[], Iterator[Any]] | None = None,
    stays_float: Sequence[str] = (),
) -> LiteRTFile:
    """A file, quantized by feeds but for `stays_float`."""
    import tensorflow as tf

    with warnings.catch_warnings(), quiet_stderr():
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_saved_model(str(folder), signature_keys=["serving_default"])
        if quantize is not None:
            kernels = tf.lite.OpsSet
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = feeds
            # The default is for what has no integer kernel, which stays in float32 and is reported.
            if quantize == "int16x8":
                integers = kernels.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
                converter.target_spec.supported_ops = [integers, kernels.TFLITE_BUILTINS]
            elif feeds is not None:
                converter.target_spec.supported_ops = [kernels.TFLITE_BUILTINS_INT8, kernels.TFLITE_BUILTINS]
        try:
            if not stays_float:
                return LiteRTFile(converter.convert())
            debugger = tf.lite.experimental.QuantizationDebugger(
                converter=converter,
                debug_dataset=feeds,
                debug_options=tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=list(stays_float)),
            )
            return LiteRTFile(debugger.get_nondebug_quantized_model())
        except Exception as error:  # its own class is private, and a calibration fails with a RuntimeError
            raise ExportError(
                f"model {model.name!r} was not exported: TensorFlow's converter to LiteRT failed{_where(error, model)}"
            ) from error


def _where(error: Exception, model: keras.Model) -> str:
    """The layer and the operation that the converter's message names."""
    text = str(error)
    # TensorFlow numbers a scope that it has seen before: dense/MatMul, then dense_1/MatMul.
    names = [
        layer.name for layer in layers_by_path(model).values() if re.search(rf"/{re.escape(layer.name)}(_\d+)*/", text)
    ]
    operations = sorted(set(re.findall(r"\btf\.[A-Z]\w*", text)))
    told = f" in layer {names[-1]!r}" if names else ""
    told += f": LiteRT has no operator for {', '.join(operations)}" if operations else f": {text[-500:]}"
    return f"{told}. Replace what computes it, or use export_float32"


def _calibrated(folder: Path, signature: Signature, model: keras.Model, calibrate: Any, quantize: str) -> LiteRTFile:
    """A file with ranges of data."""
    feed = signature.feed(calibrate, "calibrate")
    records = len(next(iter(feed.values())))

    def feeds() -> Iterator[Any]:
        return ({name: x[place : place + 1] for name, x in feed.items()} for place in range(records))

    probe = np.linspace(0, records - 1, min(records, PROBE)).astype(int)
    kept = _stays_float(_converted(folder, model), {name: x[probe] for name, x in feed.items()}, BITS[quantize])
    if kept and quantize != "int8":
        raise ExportError(
            f"model {model.name!r} was not exported: values of {HUGE:.0e} and above, such as an attention mask "
            f"has, reach {', '.join(kept[:3])}, and quantize={quantize!r} cannot keep single operators in float32, as "
            "'int8' can"
        )
    return _converted(folder, model, quantize, feeds, kept)


def _stays_float(file: LiteRTFile, feed: Mapping[str, np.ndarray], bits: int) -> list[str]:
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


def _rounded(model: keras.Model, sample: Any) -> keras.Model:
    """The same model with its rounded weights and ranges."""
    rounded = rebuild(model, to_float32, policy="float32", sample=sample, carry_compile=False).model
    try:
        settle(rounded)
    except ValueError as error:
        raise ExportError(str(error)) from error
    return rounded


def _scores(run: Any, signature: Signature, model: keras.Model, x: Any, y: Any) -> list[dict[str, float]]:
    """The loss and metrics of a model and its file."""
    feed = signature.feed(x, "evaluate")
    records = range(0, len(next(iter(feed.values()))), BATCH)
    batches = [run({name: array[start : start + BATCH] for name, array in feed.items()}) for start in records]
    predicted = model.predict(x, verbose=0)
    served = keras.tree.pack_sequence_as(predicted, [np.concatenate(parts) for parts in zip(*batches, strict=True)])
    scores = []
    for outputs in (predicted, served):
        model.reset_metrics()
        loss = model.compute_loss(x, y, outputs, training=False)
        metrics = {name: float(value) for name, value in model.compute_metrics(x, y, outputs, None).items()}
        scores.append({**metrics, "loss": float(loss)})
    model.reset_metrics()
    return scores
