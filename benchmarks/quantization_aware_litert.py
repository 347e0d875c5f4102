"""Accuracy of digits in LiteRT files: float32, int8 calibrated, int8 trained, and int8 trained beside its model.

    python benchmarks/quantization_aware_litert.py --out docs/results/quantization_aware_litert.json

A small CNN with batch normalization, residuals and depthwise convolutions is trained in float32. Its int8 file is
calibrated on the training images. Then it is converted and trained for some epochs more, and so, for comparison, is the
float32 model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import keras_mp

SEEDS = (0, 1, 2)


def network(width: int, side: int = 8) -> keras.Model:
    """A CNN of three residual blocks with depthwise convolutions, for square images."""
    inputs = keras.Input((side, side, 1), name="image")
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for _ in range(3):
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(width, 1, use_bias=False)(y))
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def fit(model: keras.Model, x: Any, y: Any, epochs: int, rate: float) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(rate, epochs * (len(x) // 32))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(schedule), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)


def exported(model: keras.Model, x: Any, y: Any, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = keras_mp.export.export_litert(model, Path(folder) / "m.tflite", x, evaluate=(x, y), **options)
    return {
        "accuracy": report.file_scores["accuracy"],
        "loss": report.file_scores["loss"],
        "model_accuracy": report.model_scores["accuracy"],
        "within_one_code": report.within_one_code,
        "bytes": report.bytes,
        "float_operators": sum(report.float_operators.values()),
    }


def measured(width: int, seed: int, epochs: int) -> dict[str, Any]:
    digits = load_digits()
    x = (digits.images[..., None] / 16).astype("float32")
    y = digits.target
    test = np.random.default_rng(seed).permutation(len(x)) < len(x) // 4
    keras.utils.set_random_seed(seed)
    model = network(width)
    fit(model, x[~test], y[~test], epochs, 3e-3)
    row = {"float32": exported(model, x[test], y[test])}
    for quantize in ("int8", "int16x8"):
        calibrated = {"quantize": quantize, "calibrate": x[~test], "integer_io": True}
        row[f"{quantize} calibrated"] = exported(model, x[test], y[test], **calibrated)
    longer = keras.models.clone_model(model)
    longer.set_weights(model.get_weights())
    fit(longer, x[~test], y[~test], epochs // 2, 1e-3)
    row["float32, trained as long"] = exported(longer, x[test], y[test])
    keras_mp.convert(model, "qat_litert")
    fit(model, x[~test], y[~test], epochs // 2, 1e-3)
    row["int8 trained"] = exported(model, x[test], y[test], integer_io=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for width in arguments.widths:
        rows = [measured(width, seed, arguments.epochs) for seed in SEEDS]
        results[f"width {width}"] = {name: [row[name] for row in rows] for name in rows[0]}
        for name, values in results[f"width {width}"].items():
            accuracies = ", ".join(f"{value['accuracy']:.2%}" for value in values)
            within = min((v["within_one_code"] for v in values if v["within_one_code"] is not None), default=None)
            mean = np.mean([value["accuracy"] for value in values])
            print(f"width {width}: {name}: {mean:.2%} ({accuracies}), within one code at least {within}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
