"""export_float32 and stabilize on every architecture of keras.applications.

    python benchmarks/sweep.py [--only NAME ...] [--markdown docs/tables/export-sweep.md]

Models are built under mixed_float16 without pretrained weights, at the smallest inputs they take. A row counts the
low-precision places that Keras's own model.export() leaves beside what export_float32 leaves, and compares the
loaded SavedModel with the model run in float32. Each row is made in a process of its own: one process for all of them
grows to 13 GB, and slows down.
"""

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.simplefilter("ignore")  # of the architectures' own, about masks and overflows in float16

import keras
import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.export.low_precision import low_precision
from keras_mp.export.verification import relative_difference
from keras_mp.rebuild.model import rebuild, unchanged
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.stability.sensitive import sensitive_layers
from keras_mp.system.atomic_write import write_text


class Row(NamedTuple):
    name: str
    parameters: int
    keras_places: int | None  # what model.export() leaves; None where it fails
    low_precision_ops: int
    nodes: int
    max_difference: float
    precision_gap: float | None  # None where a CPU has no float16 kernel for the model
    sensitive: int
    left: int  # of them, after stabilize
    stabilized_gap: float
    seconds: float


def applications() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Every model function in keras.applications, found by walking the module."""

    def builder(function: Callable) -> Callable[[], tuple[Any, Any]]:
        def build() -> tuple[Any, Any]:
            size = 96 if "Inception" in function.__name__ or "Xception" in function.__name__ else 64
            model = function(weights=None, input_shape=(size, size, 3), classes=10)
            return model, np.random.default_rng().uniform(0, 255, (2, size, size, 3)).astype("float32")

        return build

    found = {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    return {f"applications.{name}": builder(function) for name, function in sorted(found.items())}


def settle(model: Any, batch: Any) -> None:
    """Gives BatchNormalization the statistics of the batch.

    With the initial ones (mean 0, variance 1) the activations of a deep untrained network grow until its outputs
    differ from one run in float32 to the next, in eager and graph mode.
    """
    settings = {keras.layers.BatchNormalization: "momentum", keras.layers.Dropout: "rate"}
    changed = [
        (layer, setting, getattr(layer, setting))
        for layer in layers_by_path(model).values()
        for kind, setting in settings.items()
        if isinstance(layer, kind)
    ]
    for layer, setting, _ in changed:
        setattr(layer, setting, 0.0)
    model(batch, training=True)
    for layer, setting, value in changed:
        setattr(layer, setting, value)


def row(name: str) -> Row:
    """Builds a model under mixed_float16, exports it both ways and compares."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, batch = applications()[name]()
        settle(model, batch)
    finally:
        keras.config.set_dtype_policy("float32")
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        report = keras_mp.export_float32(model, Path(folder) / "float32", verify=batch)
        seconds = time.perf_counter() - started
        stabilized = keras_mp.stabilize(rebuild(model, unchanged).model)
        try:
            model.export(Path(folder) / "keras", verbose=False)
            keras_places = len(low_precision(Path(folder) / "keras"))
        except Exception:
            keras_places = None
        loaded = tf.saved_model.load(str(report.path))
        float32_outputs = loaded.serve(keras.tree.map_structure(tf.convert_to_tensor, batch))
        stabilized_gap = relative_difference(stabilized(batch, training=False), float32_outputs)
    return Row(
        name, model.count_params(), keras_places, report.low_precision_ops, report.nodes, report.max_difference,
        report.precision_gap, len(sensitive_layers(model)), len(sensitive_layers(stabilized)),
        stabilized_gap, seconds,
    )  # fmt: skip


def row_in_own_process(name: str) -> Row:
    """Makes a row in a process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(row, name).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names, or parts of names")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    names = [name for name in applications() if not arguments.only or any(part in name for part in arguments.only)]
    rows, failed = [], []
    for name in names:
        try:
            rows.append(row_in_own_process(name))
            print(*_cells(rows[-1]), sep="  ")
        except Exception as error:
            failed.append((name, f"{type(error).__name__}: {str(error)[:300]}"))
            print(f"{name}: {failed[-1][1]}")
    worst = max((each.max_difference for each in rows), default=0.0)
    print(f"{len(rows)} of {len(names)} models exported, {sum(each.low_precision_ops for each in rows)} "
          f"low-precision ops left, largest difference {worst:.1e}")  # fmt: skip
    if arguments.markdown:
        _write(arguments.markdown, rows, failed)
    return 1 if failed else 0


COLUMNS = ("model", "parameters", "16-bit places, model.export()", "low-precision ops, export_float32", "nodes",
           "largest difference from float32", "mixed_float16 is off by", "sensitive layers", "left by stabilize",
           "stabilized is off by", "seconds")  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    gap = "cannot run" if row.precision_gap is None else f"{row.precision_gap:.1e}"
    keras_places = "fails" if row.keras_places is None else f"{row.keras_places:,}"
    return (row.name, f"{row.parameters:,}", keras_places, str(row.low_precision_ops), f"{row.nodes:,}",
            f"{row.max_difference:.1e}", gap, str(row.sensitive), str(row.left),
            f"{row.stabilized_gap:.1e}", f"{row.seconds:.1f}")  # fmt: skip


def _write(path: Path, rows: list[Row], failed: list[tuple[str, str]]) -> None:
    places = sum(each.keras_places or 0 for each in rows)
    lines = [
        "# export_float32 on every architecture", "",
        f"`make sweep` on {time.strftime('%Y-%m-%d')}, keras {keras.__version__}, tensorflow {tf.__version__}.", "",
        f"{len(rows)} models were built under mixed_float16 without pretrained weights and exported, and the loaded",
        "SavedModel was compared with the model run in float32. Differences are divided by max(1, the largest output);",
        "inf means that a result is not finite. The last columns are about `stabilize`: the number of sensitive layers",
        "before and after, and the difference of the stabilized model from float32.", "",
        f"Keras's own `model.export()` leaves {places:,} 16-bit places in these models.", "",
        "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_cells(each)) + " |" for each in rows),
        *(f"\n{name} failed: {reason}" for name, reason in failed),
    ]  # fmt: skip
    write_text("\n".join(lines) + "\n", path)


if __name__ == "__main__":
    raise SystemExit(main())
