"""Files for other runtimes, made from a proven SavedModel."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp.conversion.to_float32 import unmerged_float32
from keras_mp.export.export_report import DeploymentReport
from keras_mp.export.saved_model import check_exportable, check_path, export_float32
from keras_mp.export.verification import (
    NO_ORIGINAL,
    ExportError,
    check_batch,
    computed,
    differences,
    inputs_of,
    relative_difference,
)
from keras_mp.rebuild.compared import arrays_of
from keras_mp.system.packages import install_command

# Both formats are single files whose offsets or lengths have 31 bits.
LARGEST_FILE = 2**31 - 1
# What one record, and a batch that is no power of two, tell that another size would not.
BATCH_SIZES = (1, 7)
# Two or three steps of 1/255: what rounding in an operator that stayed in float32 can move an int8 result by.
INT8_STEPS = 0.01


class Signature(NamedTuple):
    """How a SavedModel of `export_float32` is called."""

    structure: Any  # of its inputs, of `tf.TensorSpec`s
    inputs: list[str]  # their names, in the order of `keras.tree.flatten`
    outputs: list[str]  # as those of the inputs

    def feed(self, batch: Any, argument: str = "verify") -> dict[str, np.ndarray]:
        """A batch as arrays by name, in the signature's dtypes.

        Raises:
            ExportError: the argument has another structure or shape, has no record, or is not finite.
        """
        check_batch(batch, self.structure, argument)
        specs = keras.tree.flatten(self.structure)
        arrays = [np.asarray(x) for x in keras.tree.flatten(batch)]
        converted = {}
        for name, spec, array in zip(self.inputs, specs, arrays, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                converted[name] = array.astype(spec.dtype.as_numpy_dtype)
            finite = all(
                np.isfinite(values).all()
                for values in (array, converted[name])
                if np.issubdtype(values.dtype, np.number)
            )
            if not finite:
                raise ExportError(f"{argument} holds NaN or infinity for input {name!r}, in {spec.dtype.name}")
        return converted


def check(model: keras.Model, path: Path, verify: Any, packages: Sequence[str], overwrite: bool = False) -> None:
    """Refuses what cannot be exported or compared, before any work."""
    check_exportable(model)
    if verify is not None:
        check_batch(verify, inputs_of(model))
    size = sum(4 * int(np.prod(v.shape)) for v in model.weights)
    check_path(path, size, "file", overwrite)
    if size > LARGEST_FILE:
        raise ExportError(
            f"the float32 weights of model {model.name!r} take {size:,} bytes, and one file holds at most "
            f"{LARGEST_FILE:,}: use export_float32, whose SavedModel is several files"
        )
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"{', '.join(missing)} not installed, which writing {str(path)!r} needs: {install_command('export')}"
        )


@contextlib.contextmanager
def float32_saved_model(
    model: keras.Model, verify: Any, tolerance: float
) -> Iterator[tuple[Path, Signature, tuple[str, ...]]]:
    """Scope with a proven SavedModel, its signature, and notes."""
    if keras.backend.backend() != "tensorflow":
        import tensorflow as tf

        # TensorFlow only converts here: the accelerator's memory belongs to the backend.
        with contextlib.suppress(RuntimeError):  # it is running already, with the devices that the caller gave it
            tf.config.set_visible_devices([], "GPU")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved_model"
        report = export_float32(model, path, verify, tolerance=tolerance)
        # Of the model as it was, `compared` tells.
        yield path, _signature(path), tuple(note for note in report.notes if not note.startswith(NO_ORIGINAL))


def _signature(path: Path) -> Signature:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    serve = loaded.serve.concrete_functions[0]
    structure = serve.structured_input_signature[0][0]
    served = loaded.signatures["serving_default"].structured_outputs
    # Of a list of outputs TensorFlow makes output_0, output_1, ..., and output_10 must not come before output_2. Those
    # of a dict come in the order of their names as text, as keras.tree.flatten has them.
    named = isinstance(serve.structured_outputs, Mapping)
    numbers = {name: int(number[1]) for name in served if (number := re.fullmatch(r"output_(\d+)", name))}
    outputs = sorted(served) if named else sorted(served, key=lambda name: (numbers.get(name, 0), name))
    return Signature(structure, [spec.name for spec in keras.tree.flatten(structure)], outputs)


def compared(
    report: DeploymentReport,
    run: Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]],
    signature: Signature,
    model: keras.Model,
    verify: Any,
    tolerance: float,
    scales: Sequence[float] = (),
) -> DeploymentReport:
    """Reports how a written file differs from the model.

    Args:
        model: the model in its own precision.
        tolerance: the largest difference allowed from the model in float32; infinity for int8.
        scales: the scales of the outputs of a quantized file, 0 of an output that is not quantized.
    """
    feed = signature.feed(verify)
    float32 = unmerged_float32(model, verify)
    outputs = list(run(feed))
    name = f"the {report.format} file of model {model.name!r}"
    fields = differences(name, outputs, model, float32, verify, tolerance, report.notes)
    if any(scales):
        expected = arrays_of(computed(float32, verify))
        pairs = zip(outputs, expected, scales, strict=True)
        codes = [np.abs(x.astype("float64") - y).ravel() / scale for x, y, scale in pairs if scale]
        fields["within_one_code"] = float(np.mean(np.concatenate(codes) < 1.001))
    for size in BATCH_SIZES:
        again = list(run({name: np.resize(x, (size, *x.shape[1:])) for name, x in feed.items()}))
        same = relative_difference(again, [np.resize(x, (size, *x.shape[1:])) for x in outputs])
        if not same <= min(tolerance, INT8_STEPS):
            raise ExportError(
                f"{name} gives other results in a batch of {size}: they "
                f"differ by {same:.2e} from those in a batch of {len(outputs[0])}"
            )
    return dataclasses.replace(report, **fields)


def counted(names: Sequence[str]) -> dict[str, int]:
    """Counts names, in the order of the alphabet."""
    return dict(sorted(Counter(names).items()))
