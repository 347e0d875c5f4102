"""From a `.keras` file to a file for another runtime, for `keras-mp export`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from keras_mp.conversion.model_file import ModelFileError, load_model_file
from keras_mp.export.export_report import DeploymentReport, ExportReport
from keras_mp.export.litert import export_litert
from keras_mp.export.onnx import export_onnx
from keras_mp.export.saved_model import export_float32
from keras_mp.export.verification import ExportError
from keras_mp.numerics.data import inputs_among, read_arrays
from keras_mp.system.argument_checks import one_of

FORMATS = ("savedmodel", "onnx", "litert", "litert-int8", "litert-int16x8")


def export_file(
    model_path: str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: str = "savedmodel",
    verify: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    *,
    modules: Sequence[str] = (),
    unsafe: bool = False,
    integer_io: bool = False,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> ExportReport | DeploymentReport:
    """Exports from file to file; Keras must run on TensorFlow.

    By `export_float32`, `export_onnx` or `export_litert`.

    Args:
        model_path: a `.keras` file, written on any backend.
        path: a folder or a file that does not exist yet, or is replaced with `overwrite`.
        format: "savedmodel", "onnx", "litert", "litert-int8" or "litert-int16x8".
        verify: a `.npy` file of a model's only input, or an `.npz` file of `keras-mp audit --data`: x, or x/NAME for
            each of several inputs.
        calibrate: a file of inputs for a quantized format, as for `verify`.
        modules: names of modules to import first: those that define the model's custom layers and functions.
        unsafe: whether to load Python lambdas, too, which can run any code: only for files you trust.
        integer_io: whether a quantized file has integers for inputs and outputs.
        tolerance: the largest difference allowed, as for the function of the format.
        overwrite: whether an existing file or SavedModel is replaced, as for the function of the format.

    Raises:
        ValueError: there is no such format, or an option is missing for it or of another.
        FileNotFoundError: there is no such file. Else as the function of the format.
    """
    one_of("--format", format, FORMATS)
    quantize = format.removeprefix("litert-") if format.startswith("litert-") else None
    if quantize is not None and calibrate is None:
        raise ValueError(
            f"--format {format} needs --calibrate, a .npz or .npy file with hundreds of inputs like those that will "
            "be served: the ranges of integers are measured on them"
        )
    for name, given in (("calibrate", calibrate is not None), ("integer-io", integer_io)):
        if given and quantize is None:
            raise ValueError(f"--{name} is for --format litert-int8 and litert-int16x8, not {format!r}")
    for name, file in (("verify", verify), ("calibrate", calibrate)):
        if file is not None and not Path(file).exists():
            raise FileNotFoundError(f"there is no file --{name} {str(file)!r}")
        if file is not None and Path(path).exists() and Path(path).samefile(file):
            raise ValueError(f"path {str(path)!r} is the file that --{name} reads: give a new file")
    try:
        model = load_model_file(model_path, modules, unsafe=unsafe, compile=False)
    except ModelFileError as error:
        raise ExportError(str(error)) from error
    batch, data = (
        None if file is None else inputs_among(file, read_arrays(file), model) for file in (verify, calibrate)
    )
    if format == "onnx":
        return export_onnx(model, path, batch, tolerance=tolerance, overwrite=overwrite)
    if format != "savedmodel":
        return export_litert(
            model,
            path,
            batch,
            quantize=quantize,
            calibrate=data,
            integer_io=integer_io,
            tolerance=tolerance,
            overwrite=overwrite,
        )
    return export_float32(model, path, batch, tolerance=tolerance, overwrite=overwrite)
