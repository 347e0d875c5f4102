"""Write a LiteRT file, in float32 throughout or in integers, and say what is in it."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.conversion.to_float32 import to_float32
from keras_mp.export import int8
from keras_mp.export.deployment import Signature, check, compared, counted, float32_saved_model
from keras_mp.export.export_report import DeploymentReport
from keras_mp.export.litert_file import LiteRTFile
from keras_mp.export.verification import ExportError
from keras_mp.rebuild import Config, RebuildError, layers_by_path, rebuild
from keras_mp.system.atomic_write import atomic_write, parents_made
from keras_mp.system.one_of import one_of
from keras_mp.system.quiet_import import quiet_stderr

# Records on which the layers of an int8 file are compared with those of the model.
PROBE = 32
# The bits of activations by what a file can be quantized to; weights have 8.
BITS = {"int8": 8, "int16x8": 16}


def export_litert(
    model: keras.Model,
    path: str | os.PathLike[str],
    verify: Any = None,
    *,
    quantize: str | None = None,
    calibrate: Any = None,
    integer_io: bool = False,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> DeploymentReport:
    """Exports a model as a LiteRT (TensorFlow Lite) file.

    It may have been trained in any precision on any backend. `export_float32` writes and checks a SavedModel, and
    TensorFlow's converter converts it, using only LiteRT's own operators. Without `calibrate` it is in float32: no
    tensor of it may be a 16- or 8-bit float or quantized.

    With `calibrate` its weights are int8, and its activations too, or int16. The ranges are the audit's, taken in
    inference: the model runs in float32 over all of `calibrate`, each layer's lowest and highest output is kept, and
    the converter is calibrated on the records that reach them, and on `int8.TYPICAL` others for the tensors inside
    layers. The file is then run, and each layer's output in it compared with the layer.

    Recurrent layers are unrolled: the converter cannot take Keras's loops with an unknown batch size.

    Args:
        model: a built Keras model.
        path: a file that does not exist yet, or is replaced with `overwrite`.
        verify: a batch of inputs, as for `export_float32`. When given, the file is loaded again, run with LiteRT's
            interpreter, also in batches of 1 and 7, and compared with the model run in float32.
        quantize: "int8", or "int16x8" for int16 activations with int8 weights; with calibrate "int8" by default.
        calibrate: inputs in the structure of the model's, batch first, like those that will be served: hundreds.
        integer_io: whether the inputs and outputs of a quantized file are integers, as microcontrollers need them, with
            the scales that the file gives them, and not float32. Those of an operator that stays in float32 are float32
            all the same, and the report's notes name them.
        tolerance: the largest difference that `verify` allows of a float32 file, relative to max(1, the largest
            magnitude of each output). The difference of a quantized file is reported, whatever it is.
        overwrite: whether an existing file is replaced, after the new one was checked.

    Returns:
        A `DeploymentReport`.

    Raises:
        ImportError: If TensorFlow is not installed.
        ValueError: If quantize is unknown, or integer_io is True and nothing is quantized.
        ExportError: As for `export_float32`; also if LiteRT has no operator for an operation of a layer, if quantize
            comes without calibrate, or if calibrate does not fit the model or is not finite.
    """
    path = Path(path)
    if quantize is not None:
        one_of("quantize", quantize, BITS)
    elif calibrate is not None:
        quantize = "int8"
    elif integer_io:
        raise ValueError("integer_io=True is for a quantized file: give quantize='int8', and calibrate")
    check(model, path, verify, ["tensorflow"], overwrite)
    if quantize is not None and calibrate is None:
        raise ExportError(
            f"quantize={quantize!r} needs calibrate, hundreds of inputs like those that will be served: the ranges of "
            "activations are measured on them"
        )
    flat = unrolled(model, verify)
    try:
        with float32_saved_model(flat, verify, tolerance) as (folder, signature, notes):
            if quantize is None:
                file, report = _converted(folder, model), DeploymentReport(path, "LiteRT", 0, {})
            else:
                file, report = _quantized(folder, signature, model, calibrate, quantize)
    except ValueError as error:
        if flat is not model and "Cannot unroll" in str(error):
            raise ExportError(
                f"the recurrent layers of model {model.name!r} cannot be unrolled, which LiteRT needs: give its Input "
                "a fixed number of steps"
            ) from error
        raise
    if integer_io:
        file = file.with_integer_io(BITS[quantize])  # type: ignore[index]
        still = ", ".join(file.float_io())
        notes += (f"{still} stay float32, because an operator in float32 reads or writes them",) if still else ()
    remaining = file.low_precision(quantized=quantize is not None)
    if remaining:
        raise ExportError(f"model {model.name!r} was not exported: low precision would be left in {remaining[:5]}")
    report = dataclasses.replace(
        report, path=path, bytes=len(file.content), operators=counted(file.operators()), notes=notes
    )
    with parents_made(path), atomic_write(path) as partial:
        partial.write_bytes(file.content)
        if verify is not None:
            run = LiteRTFile(partial.read_bytes()).runner(signature.outputs)
            largest = tolerance if quantize is None else math.inf
            report = compared(report, run, signature, model, verify, largest)
    return report


def unrolled(model: keras.Model, sample: Any = None) -> Any:
    """The model with its recurrent layers unrolled, or the model itself where it has none.

    Raises:
        RebuildError: a layer cannot be rebuilt.
    """
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
    """A file, quantized with the ranges that feeds have, but for the operators with outputs of names in stays_float."""
    import tensorflow as tf

    with warnings.catch_warnings(), quiet_stderr():
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_saved_model(str(folder), signature_keys=["serving_default"])
        if quantize is not None:
            kernels = tf.lite.OpsSet
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = feeds
            # The second for what has no integer kernel, which stays in float32 and is reported.
            converter.target_spec.supported_ops = [
                kernels.TFLITE_BUILTINS_INT8
                if quantize == "int8"
                else kernels.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8,
                kernels.TFLITE_BUILTINS,
            ]
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
    """What of the converter's pages of message names a layer and an operation."""
    text = str(error)
    # TensorFlow numbers a scope that it has seen before: dense/MatMul, then dense_1/MatMul.
    names = [
        layer.name for layer in layers_by_path(model).values() if re.search(rf"/{re.escape(layer.name)}(_\d+)*/", text)
    ]
    operations = sorted(set(re.findall(r"\btf\.[A-Z]\w*", text)))
    told = f" in layer {names[-1]!r}" if names else ""
    told += f": LiteRT has no operator for {', '.join(operations)}" if operations else f": {text[-500:]}"
    return f"{told}. Replace what computes it, or use export_float32"


def _quantized(
    folder: Path, signature: Signature, model: keras.Model, data: Any, quantize: str
) -> tuple[LiteRTFile, DeploymentReport]:
    feed = signature.feed(data, "calibrate")
    arrays = keras.tree.pack_sequence_as(signature.structure, list(feed.values()))
    float32 = rebuild(model, to_float32, policy="float32", sample=arrays, carry_compile=False).model
    outputs = int8.observe(float32, arrays)
    records = len(next(iter(feed.values())))
    places = int8.chosen(outputs, records)

    def feeds() -> Iterator[Any]:
        return ({name: x[place : place + 1] for name, x in feed.items()} for place in places)

    probe = int8.spread(records, PROBE)
    probed = {name: x[probe] for name, x in feed.items()}
    expected = int8.outputs_of(float32, keras.tree.map_structure(lambda x: x[probe], arrays))
    in_float = _converted(folder, model)
    kept = int8.stays_float(in_float, probed, BITS[quantize])
    if kept and quantize != "int8":
        raise ExportError(
            f"model {model.name!r} was not exported: values of {int8.HUGE:.0e} and above, such as an attention mask "
            f"has, reach {', '.join(kept[:3])}, and quantize={quantize!r} cannot keep single operators in float32, as "
            "'int8' can"
        )
    file = _converted(folder, model, quantize, feeds, kept)
    report = DeploymentReport(
        folder,
        f"LiteRT {quantize}",
        0,
        {},
        float_operators=counted(file.float_operators()),
        calibrated_on=len(places),
        layers=int8.layers(outputs, expected, in_float, file, probed, BITS[quantize]),
    )
    return file, report
