"""Writes a SavedModel in float32, and proves that it is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.conversion.model_file import input_names
from keras_mp.conversion.to_float32 import is_merged, merged_float32, unmerged_float32
from keras_mp.export.export_report import ExportReport
from keras_mp.export.low_precision import LowPrecision, count_nodes, low_precision
from keras_mp.export.self_check import self_check
from keras_mp.export.verification import NO_ORIGINAL, ExportError, check_batch, differences, inputs_of
from keras_mp.rebuild.compared import check_same
from keras_mp.rebuild.config import custom_objects_of
from keras_mp.rebuild.merged import is_adapted, why_not_merged
from keras_mp.rebuild.walk import RebuildError, check_is_model, layers_by_path
from keras_mp.reporting.progress import progress
from keras_mp.reporting.text import byte_size
from keras_mp.stability.output_layers import calls_steps
from keras_mp.system.atomic_write import parents_made
from keras_mp.system.packages import install_command


def export_float32(
    model: keras.Model,
    path: str | os.PathLike[str],
    verify: Any = None,
    *,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> ExportReport:
    """Exports a model as a SavedModel in float32.

    It may have been trained in any precision; the file has no float of 16 or 8 bits. The model's config is rewritten to
    float32 and rebuilt with the same weights. Weights that Keras quantized to int8 or int4 are dequantized, and LoRA's
    product is added to the weights beside it. The inference-mode call is written under another name. Every node,
    attribute, constant and variable of it is inspected. It is loaded and run on random inputs, with two batch sizes and
    two sizes of each open axis, and compared with the model in float32. Then it is renamed to `path`; on an error
    nothing is left behind. The model is not changed. On the JAX backend this happens in a separate process that runs
    Keras on TensorFlow, which must be installed.

    Three copies of the float32 weights are in memory at once: the model's, the rebuilt model's and the loaded ones.

    The SavedModel has one endpoint, `serve` (and `serving_default`), whose inputs are called as the model's input
    layers are, or as the keys of their dict, and have an unknown batch size.

    Args:
        model: a built Keras model.
        path: a folder that does not exist yet, or with `overwrite` a SavedModel.
        verify: a batch of inputs (any structure of arrays, batch first, as `model(...)` takes it). When given, the
            SavedModel is compared on it, too, with the model run in float32. For a subclassed model it also tells the
            inputs' dtypes.
        tolerance: the largest difference allowed, relative to max(1, the largest magnitude of each output).
        overwrite: whether an existing SavedModel is replaced, after the new one was checked; on an error the old one
            stays.

    Returns:
        An `ExportReport`.

    Raises:
        FileExistsError: If `path` exists; with `overwrite`, if it is neither a SavedModel nor an empty folder.
        OSError: If there is no room for the SavedModel.
        ImportError: If TensorFlow is not installed.
        ExportError: If the model is not built, or has a layer quantized in another mode than "int8" and "int4"; if
            verify is no batch of its inputs; if low precision, or bytecode that cannot be inspected, is left in the
            result; if the results differ, or are NaN or infinite, and cannot be compared.
        RebuildError: If a layer cannot be rebuilt.

    Examples:
        >>> import keras, keras_mp, numpy as np, tempfile
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> path = tempfile.mkdtemp() + "/saved_model"
        >>> keras_mp.export_float32(model, path, verify=np.ones((2, 8), "float32")).low_precision_ops
        0
    """
    path = Path(path)
    check_exportable(model)
    if verify is not None:
        check_batch(verify, inputs_of(model))
    check_path(path, sum(4 * int(np.prod(v.shape)) for v in model.weights), overwrite=overwrite)
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "export_float32 writes the SavedModel with TensorFlow, which is not installed: "
            f"{install_command('tensorflow')}. Or save the model with model.save('model.keras') and run, where "
            f"TensorFlow is installed, `keras-mp export model.keras {path}`"
        )
    with parents_made(path):
        if keras.backend.backend() != "tensorflow":
            return _export_in_tensorflow_process(model, path, verify, tolerance, overwrite)
        return _export(model, path, verify, tolerance, overwrite)


def _export(model: keras.Model, path: Path, verify: Any, tolerance: float, overwrite: bool) -> ExportReport:
    import tensorflow as tf

    with progress("export", 4) as tell, _beside(path, overwrite) as partial:
        tell("makes the model float32")
        float32 = merged_float32(model, verify)
        reference = float32 if is_merged(model) else unmerged_float32(model, verify)
        signature = _input_signature(float32, verify)
        tell("writes the SavedModel", 1)
        _write(float32, partial, signature)
        tell("looks at its operations", 1)
        findings = low_precision(partial)
        if findings:
            raise ExportError(_refusal(findings, float32))
        report = ExportReport(path, count_nodes(partial), len(findings))
        tell("compares it with the model", 1)
        loaded = tf.saved_model.load(str(partial))  # named, because its functions do not keep its variables alive
        # First, because a layer that draws random numbers goes on from the seeds that were saved.
        if verify is not None:
            batch = _as_signature(verify, signature[0])
            with backend.full_float32():
                outputs = loaded.serve(batch)
            report = _compared(report, outputs, model, reference, batch, tolerance)
        notes = self_check(loaded.serve, reference, signature[0], tolerance)
        return dataclasses.replace(report, notes=(*report.notes, *notes))


def check_exportable(model: keras.Model) -> None:
    """Refuses models not built, or quantized in unknown ways."""
    check_is_model(model)
    if not model.built:
        raise ExportError(
            f"model {model.name!r} is not built, so there is nothing to export: call it once on a batch, "
            "or model.build(input_shape)"
        )
    for path, layer in layers_by_path(model).items():
        wrong = why_not_merged(layer) if is_adapted(layer) else ""
        if wrong:
            raise ExportError(
                f"layer {path!r} cannot be written as float32: {wrong}. Export the model as it was before "
                "model.quantize(), or use model.export()"
            )


def check_path(path: Path, bytes_needed: int, kind: str = "folder", overwrite: bool = False) -> None:
    """Refuses a path not to be overwritten, or without room."""
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"path {str(path)!r} exists: give a new {kind}, or replace it with overwrite=True (--overwrite)"
        )
    if path.exists() and not _replaceable(path, kind):
        other = "a folder" if path.is_dir() else "a file"
        raise FileExistsError(
            f"path {str(path)!r} is {other} of something else, which is not overwritten: give a new {kind}"
        )
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < bytes_needed:
        raise OSError(
            f"no room for {str(path)!r}: the float32 weights take {byte_size(bytes_needed)}, {byte_size(free)} are "
            f"free in {str(parent)!r}"
        )


def _replaceable(path: Path, kind: str) -> bool:
    if kind == "file":
        return path.is_file() and not zipfile.is_zipfile(path)  # as a .keras file is, and data in an .npz file
    return path.is_dir() and ((path / "saved_model.pb").is_file() or not any(path.iterdir()))


@contextlib.contextmanager
def _beside(path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `path`, which takes its place on success."""
    # What is at `path` by then goes only where it may be overwritten, and only after the new folder is in its place.
    path = Path(os.path.realpath(path))
    unique = uuid.uuid4().hex[:8]
    partial, old = (path.parent / f".{path.name}.{unique}.{kind}" for kind in ("partial", "old"))
    try:
        yield partial
        if path.exists() and overwrite:
            check_path(path, 0, overwrite=True)
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not path.exists():  # after Ctrl-C between the two as well
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)


def _write(model: keras.Model, path: Path, signature: list[Any]) -> None:
    import tensorflow as tf

    def serve(*args: Any) -> Any:
        return model(*args, training=False)

    archive = keras.export.ExportArchive()
    archive.track(model)
    steps = [(path, layer) for path, layer in layers_by_path(model).items() if calls_steps(layer)]
    try:
        with wrapped_methods(steps, ["call"], _over_all_steps):
            archive.add_endpoint("serve", serve, input_signature=signature)
            archive.write_out(str(path), verbose=False)
    except tf.errors.OpError as error:  # how TensorFlow's file system reports a full disk
        raise OSError(f"could not write the SavedModel to {str(path.parent)!r}: {error.message}") from error


def _over_all_steps(path: str, layer: keras.layers.Layer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a TimeDistributed layer, over all steps."""
    # Keras 3.15 takes the size of the batch for the number of steps where a graph leaves that open: it reads the shape
    # before it swaps the two axes.

    @functools.wraps(call)
    def corrected(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if inputs.shape[1] is not None:
            return call(inputs, training=training, mask=mask)
        # Private, as in Keras's own: which arguments the wrapped layer's call takes.
        takes_mask, takes_training = layer.layer._call_has_mask_arg, layer.layer._call_has_training_arg
        steps = {"inputs": inputs} | ({"mask": mask} if takes_mask and mask is not None else {})

        def one_step(step: dict[str, Any]) -> Any:
            options = {"training": training} if takes_training else {}
            options |= {"mask": step["mask"]} if "mask" in step else {}
            return layer.layer.call(step["inputs"], **options)

        steps = {key: keras.ops.swapaxes(value, 0, 1) for key, value in steps.items()}
        return keras.ops.swapaxes(keras.ops.vectorized_map(one_step, steps), 0, 1)

    return corrected


def _input_signature(model: keras.Model, sample: Any) -> list[Any]:
    """Tensor specs of the model's inputs, of unknown batch size."""
    import tensorflow as tf

    def spec(tensor: Any, name: str | None) -> Any:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        dtype = "float32" if keras.backend.is_float_dtype(dtype) else dtype  # also of a batch in numpy's float64
        return tf.TensorSpec((None, *tensor.shape[1:]), dtype, name=name)

    structure = inputs_of(model)
    if structure is not None:
        specs = map(spec, keras.tree.flatten(structure), input_names(structure))
        return [keras.tree.pack_sequence_as(structure, list(specs))]
    name = next(iter(inspect.signature(model.call).parameters), "inputs")
    if sample is None:
        sample = _recorded_inputs(model)
    flat = keras.tree.flatten(sample)
    names = [name] if len(flat) == 1 else [f"{name}_{index}" for index in range(len(flat))]
    return [keras.tree.pack_sequence_as(sample, [spec(np.asarray(x), n) for x, n in zip(flat, names, strict=True)])]


def _recorded_inputs(model: keras.Model) -> Any:
    """Zeros in the shapes of a subclassed model's build."""
    shape = (model.get_build_config() or {}).get("input_shape")
    if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) or size is None for size in shape):
        raise ExportError(
            f"the inputs of subclassed model {model.name!r} are not known: pass verify=batch, from which their "
            "structure, shapes and dtypes are read"
        )
    return np.zeros([size or 1 for size in shape], keras.backend.standardize_dtype(model.input_dtype))


def _refusal(findings: list[LowPrecision], model: keras.Model) -> str:
    names = {layer.name for layer in layers_by_path(model).values()}
    lines = []
    for finding in findings[:5]:
        # TensorFlow numbers a scope that it has seen before: dense/MatMul, then dense_1/MatMul.
        parts = [part if part in names else re.sub(r"_\d+$", "", part) for part in finding.node.split("/")]
        layer = next((part for part in reversed(parts) if part in names), None)
        where = f"layer {layer!r}" if layer else "no layer"
        lines.append(f"\n  node {finding.node!r} ({finding.op}, {finding.what}), in {where}")
    more = f"\n  and {len(findings) - 5} more" if len(findings) > 5 else ""
    return (
        f"model {model.name!r} was not exported: {len(findings)} low-precision or opaque places would be left in it:"
        f"{''.join(lines)}{more}\nA layer whose call() names a 16-bit dtype should cast to self.compute_dtype, which a "
        "float32 rebuild changes."
    )


def served(path: str | os.PathLike[str], model: keras.Model, batch: Any) -> list[np.ndarray]:
    """What a SavedModel gives on a batch, without structure."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # named, because its functions do not keep its variables alive
    outputs = loaded.serve(_as_signature(batch, _input_signature(model, batch)[0]))
    return [x.numpy() for x in keras.tree.flatten(outputs)]


def _as_signature(batch: Any, signature: Any) -> Any:
    """The batch as tensors of the signature's dtypes."""
    import tensorflow as tf

    return keras.tree.map_structure(lambda spec, x: tf.cast(tf.convert_to_tensor(x), spec.dtype), signature, batch)


def _compared(
    report: ExportReport, served: Any, model: keras.Model, float32: keras.Model, batch: Any, tolerance: float
) -> ExportReport:
    """The report with the differences from the model."""
    hint = (
        ". Possible causes: a layer that is random at inference, a call() that depends on more than its inputs, and "
        "untrained weights, which amplify rounding"
    )
    name = f"the SavedModel of model {model.name!r}"
    fields = differences(name, served, model, float32, batch, tolerance, report.notes, hint)
    return dataclasses.replace(report, **fields)


def _export_in_tensorflow_process(
    model: keras.Model, path: Path, verify: Any, tolerance: float, overwrite: bool
) -> ExportReport:
    """Exports on TensorFlow, compares with this backend's outputs."""
    things = custom_objects_of(model).values()
    modules = {thing.__module__ for thing in things}
    if "__main__" in modules:
        names = ", ".join(dict.fromkeys(thing.__name__ for thing in things if thing.__module__ == "__main__"))
        raise ExportError(
            f"{names} of model {model.name!r} is defined in __main__, which the process that exports on TensorFlow "
            "cannot import: move it to a module of its own"
        )
    with tempfile.TemporaryDirectory() as name, _beside(path, overwrite) as partial:
        folder = Path(name)
        # Keras's way to save a model with LoRA merges it, and quantizes the result again.
        whole = model if is_merged(model) else merged_float32(model, verify)
        whole.save(folder / "model.keras")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*compile.*")
            objects = custom_objects_of(model)
            again = keras.saving.load_model(folder / "model.keras", objects, compile=False, safe_mode=False)
        check_same(whole, again, verify, modes=(False,))  # a file holds what configs say, and no more
        request = {
            "path": partial,
            "modules": sorted(modules),
            "tolerance": tolerance,
            "policy": keras.dtype_policies.serialize(keras.mixed_precision.dtype_policy()),
            "batch": None if verify is None else keras.tree.map_structure(np.asarray, verify),
        }
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        result = _answered(folder)
        # Of the model as it was, this backend tells.
        notes = tuple(note for note in result["report"].notes if not note.startswith(NO_ORIGINAL))
        report = dataclasses.replace(result["report"], path=path, notes=notes)
        if verify is not None:
            report = _compared(report, result["outputs"], model, unmerged_float32(model, verify), verify, tolerance)
    return report


def _answered(folder: Path) -> dict[str, Any]:
    """The report that `keras_mp.export.worker` writes of a folder."""
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "CUDA_VISIBLE_DEVICES": "",  # the accelerator's memory belongs to the process that trained
    }
    command = [sys.executable, "-m", "keras_mp.export.worker", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    failed = "exporting in a process on TensorFlow failed"
    if not (folder / "result.pickle").is_file():
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ExportError(f"{failed}: it ended with status {done.returncode}: {last}")
    result = pickle.loads((folder / "result.pickle").read_bytes())
    if "error" not in result:
        return result
    kinds = {kind.__name__: kind for kind in (OSError, RebuildError)}
    raise kinds.get(result["error"], ExportError)(f"{failed}: {result['message']}")
