"""Accuracy, or bits a byte, of models in float, quantized after training, and trained for it; and a step's cost.

    python benchmarks/quantization_aware.py digits cnn --markdown table.md
    python benchmarks/quantization_aware.py language_model --epochs 2 --layers 2 --width 64
    python benchmarks/quantization_aware.py step

Three seeds each, and their mean. "After training" is Keras's `quantize()` of the float model; "trained for it" goes on
from the float weights with `keras_mp.convert`, for `--more` passes at a third of the rate, and is quantized by
`keras_mp.quantize`, which refuses unless every bit of the outputs stays. "Float, more" has trained as many passes more.
"""

import argparse
import dataclasses
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_mp
from benchmarks.quantization_aware_litert import network
from recipes.datasets.text import read, sequences, split
from recipes.language_model import build, language_model

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CONFIGS = {
    "int8": keras.quantizers.Int8QuantizationConfig(),
    "int4, blocks of 128": keras.quantizers.Int4QuantizationConfig(block_size=128),
    "int4, per channel": keras.quantizers.Int4QuantizationConfig(block_size=None),
}


def digits():
    """The training and the test part of scikit-learn's digits, as rows of 64 numbers."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype("float32"), data.target[order]
    return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def dense_model(options):
    layers = [keras.layers.Dense(24, "relu"), keras.layers.Dense(24, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def small_cnn(options):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(16, "relu"),
            layers.Dense(10),
        ]
    )


def bytes_of_text():
    config = language_model()
    parts = split(read(config.corpus), config.sequence_length)
    return tuple(sequences(part, config.sequence_length) for part in parts)


def byte_model(options):
    return build(dataclasses.replace(language_model(), layers=options.layers, width=options.width))


# A builder, the data, the modes, passes, rate and what is measured.
TASKS = {
    "digits": (dense_model, digits, tuple(CONFIGS), 25, 3e-3, "accuracy"),
    "cnn": (small_cnn, digits, tuple(CONFIGS), 25, 3e-3, "accuracy"),
    "language_model": (byte_model, bytes_of_text, ("int4, blocks of 128", "int4, per channel"), 2, 2e-3, "bits a byte"),
}


def fitted(model, data, epochs, rate, seed):
    keras.utils.set_random_seed(seed)
    steps = epochs * -(-len(data[0]) // 32)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.05)
    keras_mp.prepare(model, keras.optimizers.Adam(schedule, global_clipnorm=1.0), LOSS, metrics=["accuracy"])
    model.fit(*data, batch_size=32, epochs=epochs, verbose=0)


def measured(model, data, unit):
    loss, accuracy = model.evaluate(*data, batch_size=128, verbose=0)
    return accuracy * 100 if unit == "accuracy" else loss / math.log(2)


def rows_of(task, options):
    """A row for each mode: the figures of each seed."""
    make, load, modes, epochs, rate, unit = TASKS[task]
    epochs, (train, test) = options.epochs or epochs, load()
    figures = {mode: [] for mode in modes}
    for seed in range(options.seeds):
        keras.utils.set_random_seed(seed)
        model = make(options)
        fitted(model, train, epochs, rate, seed)
        weights, plain = model.get_weights(), measured(model, test, unit)
        fitted(model, train, options.more, rate / 3, seed + 100)
        more = measured(model, test, unit)
        for mode in modes:
            after, aware = make(options), make(options)
            for one in (after, aware):
                one.set_weights(weights)
            keras_mp.prepare(after, "sgd", LOSS, metrics=["accuracy"])
            after.quantize(CONFIGS[mode].mode, config=CONFIGS[mode])
            keras_mp.convert(aware, CONFIGS[mode])
            fitted(aware, train, options.more, rate / 3, seed + 100)
            keras_mp.quantize(aware, test[0][:64])
            figures[mode].append((plain, more, measured(after, test, unit), measured(aware, test, unit)))
            print(task, seed, mode, [round(x, 4) for x in figures[mode][-1]], flush=True)
    for mode, seeds in figures.items():
        yield f"| {task}, {unit} | {mode} | {' | '.join(map(told, np.array(seeds).T))} |"


def told(values):
    return f"{np.mean(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})"


def four_dense():
    return keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024, "relu") for _ in range(4))])


LITERT = {"int8 of LiteRT": "qat_litert", "int16x8 of LiteRT": "qat_litert_int16x8"}
# What is measured: a builder, the shapes of inputs and targets, the modes.
STEPS = {
    "Dense, 256 rows": (four_dense, (256, 1024), (256, 1024), CONFIGS),
    "Dense, 2048 rows": (four_dense, (2048, 1024), (2048, 1024), CONFIGS),
    "CNN, 64 images": (lambda: network(16, 16), (64, 16, 16, 1), (64, 10), LITERT),
}


def step_rows(options):
    """Steps of each of `STEPS`, all models in turn: the median, and that of the ratios to float32."""
    for name, (make, *shapes, modes) in STEPS.items():
        x, y = (np.random.default_rng(0).normal(size=shape).astype("float32") for shape in shapes)
        models, times = {"float32": make(), **{mode: keras_mp.convert(make(), modes[mode]) for mode in modes}}, []
        for model in models.values():
            model.compile("sgd", "mse", jit_compile=True)
        for _ in range(12):
            times.append([])
            for model in models.values():
                start = time.perf_counter()
                float(model.train_on_batch(x, y))
                times[-1].append(time.perf_counter() - start)
        steps = np.array(times[3:])
        ratios = np.median(steps / steps[:, :1], axis=0)
        for (mode, model), step, ratio in zip(models.items(), np.median(steps, axis=0), ratios, strict=True):
            memory = ""
            if keras.backend.backend() == "jax":
                memory = f"{keras_mp.inspect(model, (x, y)).memory.temporary / 2**20:.1f} MiB"
            yield f"| {name} | {mode} | {step * 1e3:.0f} ms | {ratio:.2f} | {memory} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=[*TASKS, "step"])
    for name, default in (("seeds", 3), ("epochs", 0), ("more", 10), ("layers", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = []
    for task in options.tasks:
        if task == "step":
            names = ("layers", "mode", "a step", "of float32's", "temporary memory")
            lines += ["", f"| {' | '.join(names)} |", f"| --- | --- |{' ---: |' * 3}", *step_rows(options)]
        else:
            names = ("task", "mode", "float", "float, more", "quantized after training", "trained for it")
            head = "" if lines else f"| {' | '.join(names)} |\n| --- | --- |{' ---: |' * 4}"
            lines += [*([head] if head else []), *rows_of(task, options)]
        text = "\n".join(lines).strip() + "\n"
        print(text, flush=True)
        if options.markdown:
            options.markdown.write_text(text)


if __name__ == "__main__":
    main()
