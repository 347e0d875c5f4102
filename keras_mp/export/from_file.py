"""From a `.keras` file to a file for another runtime, for `keras-mp export --format`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.export.export_report import DeploymentReport
from keras_mp.export.litert import export_litert
from keras_mp.export.onnx import export_onnx
from keras_mp.export.saved_model import load_batch, load_model
from keras_mp.numerics.data import read_arrays

FORMATS = ("onnx", "litert", "litert-int8")


def deploy_file(
    model_path: str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: str,
    verify: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    *,
    modules: Sequence[str] = (),
    unsafe: bool = False,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> DeploymentReport:
    """`export_onnx` or `export_litert` from file to file.

    Args:
        model_path: a `.keras` file, written on any backend.
        path: a file that does not exist yet, or is replaced with `overwrite`.
        format: "onnx", "litert" or "litert-int8".
        verify: as for `export_file`: a `.npy` file, or a `.npz` file with the model's inputs in the order of
            `keras.tree.flatten`.
        calibrate: for "litert-int8": such a file; or the `.npz` file of `keras-mp audit --data`, with arrays x and y.
        modules: as for `export_file`.
        unsafe: as for `export_file`.
        tolerance: as for `export_onnx`.
        overwrite: as for `export_onnx`.

    Raises:
        ValueError: there is no such format, or calibrate is not given for int8, or given for another.
        FileNotFoundError: there is no such file. Else as `export_onnx` and `export_litert`.
    """
    if format not in FORMATS:
        raise ValueError(
            f"format={format!r} must be one of {', '.join(map(repr, FORMATS))}; for a SavedModel there is "
            "export_float32"
        )
    if format == "litert-int8" and calibrate is None:
        raise ValueError(
            "format='litert-int8' needs calibrate, a .npz or .npy file with hundreds of inputs like those that will be "
            "served: the ranges of int8 are measured on them"
        )
    if format != "litert-int8" and calibrate is not None:
        raise ValueError(f"calibrate is for format='litert-int8', not {format!r}")
    for name, file in (("verify", verify), ("calibrate", calibrate)):
        if file is not None and not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {name}={str(file)!r}")
        if file is not None and Path(path).exists() and Path(path).samefile(file):
            raise ValueError(f"path={str(path)!r} is the file that {name} reads: give a new file")
    model = load_model(model_path, modules, unsafe)
    batch = None if verify is None else load_batch(verify, model)
    if format == "onnx":
        return export_onnx(model, path, batch, tolerance=tolerance, overwrite=overwrite)
    data = None if calibrate is None else _calibration_data(calibrate, model)
    return export_litert(model, path, batch, calibrate=data, tolerance=tolerance, overwrite=overwrite)


def _calibration_data(file: str | os.PathLike[str], model: keras.Model) -> Any:
    arrays = read_arrays(file)
    one_input = len(keras.tree.flatten(getattr(model, "inputs", None) or [None])) == 1
    return arrays["x"] if {"x", "y"} <= arrays.keys() and one_input else load_batch(file, model)
