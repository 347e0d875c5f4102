"""The training recipe digits in every deployment format: accuracy, size of the file, time of a prediction.

    python benchmarks/deployment.py --out docs/results/deployment.json

Trains it in mixed_bfloat16 with three seeds, exports each in all four formats, runs them in their own runtimes
with the defaults of these on the test images, and prints a table. Three minutes on 2 cores of a CPU.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf
from results import write

import keras_mp
from keras_mp.export.export_report import DeploymentReport, ExportReport
from keras_mp.system.packages import installed
from recipes import digits
from recipes.datasets.digits import load

COLUMNS = ["format", "test accuracy", "right, of 355, by seed", "largest difference", "size", "1 image", "64 images"]
PACKAGES = ("keras-mp", "keras", "tensorflow", "onnx", "onnxruntime", "tf2onnx", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="trainings, from seed 0 on")
    parser.add_argument("--repeats", type=int, default=300, help="predictions that are timed")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path(folder), arguments.epochs, seed, arguments.repeats)
    print("\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ["---"] * len(COLUMNS), *summary(rows)]))
    if arguments.out:
        command = f"python benchmarks/deployment.py {' '.join(sys.argv[1:])}"
        write(arguments.out, "Digits in every deployment format", command, COLUMNS, summary(rows), installed(PACKAGES))


def measure(folder: Path, epochs: int, seed: int, repeats: int) -> list[dict]:
    config = digits.Config(
        policy="mixed_bfloat16", epochs=epochs, seed=seed, output=str(folder), export=False, name="digits"
    )
    digits.train(config)
    model = keras.saving.load_model(folder / "digits" / "model.keras", compile=False)
    images, labels = load("test")
    verify, calibrate = images[:64], load("train")[0]
    saved = keras_mp.export_float32(model, folder / "saved_model", verify)
    onnx = keras_mp.export.export_onnx(model, folder / "digits.onnx", verify)
    litert = keras_mp.export.export_litert(model, folder / "digits.tflite", verify)
    int8 = keras_mp.export.export_litert(model, folder / "digits_int8.tflite", verify, calibrate=calibrate)
    print(int8)
    runs = {
        "SavedModel": (saved, saved_model(saved.path)),
        "ONNX": (onnx, onnxruntime_of(onnx.path)),
        "LiteRT": (litert, interpreter_of(litert.path)),
        "LiteRT int8": (int8, interpreter_of(int8.path)),
    }
    return [
        {"format": name, "seed": seed, **row(report, run, images, labels, repeats)}
        for name, (report, run) in runs.items()
    ]


Run = Callable[[np.ndarray], np.ndarray]


def saved_model(path: Path) -> Run:
    loaded = tf.saved_model.load(str(path))
    return lambda x: loaded.serve(tf.constant(x)).numpy()


def onnxruntime_of(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    return lambda x: session.run(None, {"images": x})[0]


def interpreter_of(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's interpreter is to move to a package of its own
        run = tf.lite.Interpreter(str(path)).get_signature_runner("serving_default")
    return lambda x: run(images=x)["output_0"]


def row(
    report: ExportReport | DeploymentReport,
    run: Run,
    images: np.ndarray,
    labels: np.ndarray,
    repeats: int,
) -> dict:
    right = int((run(images).argmax(axis=1) == labels).sum())
    files = [file for file in report.path.rglob("*") if file.is_file()] if report.path.is_dir() else [report.path]
    return {
        "right": right,
        "of": len(labels),
        "accuracy": right / len(labels),
        "bytes": sum(file.stat().st_size for file in files),
        "max_difference": report.max_difference,
        "milliseconds_1": milliseconds(run, images[:1], repeats),
        "milliseconds_64": milliseconds(run, images[:64], repeats),
    }


def milliseconds(run: Run, batch: np.ndarray, repeats: int) -> float:
    """The median, after ten predictions that count for nothing."""
    times = []
    for _ in range(10 + repeats):
        start = time.perf_counter()
        run(batch)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[10:])


def summary(rows: list[dict]) -> list[list[str]]:
    """A row a format: accuracies of all seeds, the largest difference, and the medians of size and time."""
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        of = [row for row in rows if row["format"] == name]
        size, one, many = (
            statistics.median(row[key] for row in of) for key in ("bytes", "milliseconds_1", "milliseconds_64")
        )
        lines.append(
            [
                name,
                f"{100 * statistics.mean(row['accuracy'] for row in of):.2f}%",
                ", ".join(str(row["right"]) for row in of),
                f"{max(row['max_difference'] for row in of):.1e}",
                f"{size / 1024:.0f} KiB",
                f"{one:.2f} ms",
                f"{many:.2f} ms",
            ]
        )
    return lines


if __name__ == "__main__":
    main()
