"""What islands cost, what they gain, and what they do to a training: on TensorFlow, on a CPU.

    python benchmarks/islands.py shapes
    python benchmarks/islands.py activations
    python benchmarks/islands.py curves digits
    python benchmarks/islands.py curves language_model

`shapes`: the cost where shapes change: a last batch that is smaller, many batch sizes, and lengths that vary. For each
of the first batch sizes two programs are compiled for each kind of normalization and activation; the operations of
later sizes, and of lengths that are unknown when the step is traced, are kernels.

`activations`: GELU and SiLU as islands, the time forward and backward, of that of Keras's kernels; the median of seven
rounds, which measure both. A minute on 2 cores.

`curves`: trains a recipe's model with islands and with TensorFlow's kernels alone, in mixed_bfloat16, on the same
batches with the same seeds. Islands sum in another order. What that does to a training is what another order of the
rows within each batch does, which changes nothing else: a third training, by kernels, has them so. Prints the losses at
the end, and draws docs/islands-<recipe>.svg: the difference of the curves, beside how far the seeds are from each
other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import keras
import numpy as np
import tensorflow as tf
from peer_keras import cross_entropy, optimizer

import keras_mp
from keras_mp import backend
from keras_mp.lean.gelu import gelu
from keras_mp.reporting.pictures import difference_picture
from models.transformer import Size
from models.vit import vit
from recipes import digits, language_model

LENGTHS = (48, 64, 80, 96, 112, 128)
DOCS = Path(__file__).resolve().parents[1] / "docs"
RECIPES = {"digits": digits, "language_model": language_model}
KERNELS, ISLANDS, REORDERED = "TensorFlow's kernels", "with islands", "reordered rows"
AVERAGED = 4  # steps of a point of the picture

ACTIVATIONS: dict[str, Callable] = {
    "GELU": lambda x: keras.ops.gelu(x, approximate=False),
    "GELU by tanh": lambda x: keras.ops.gelu(x, approximate=True),
    "SiLU": keras.ops.silu,
}
ACTIVATION_SHAPES = ((64, 64), (8, 64, 64), (8, 197, 768), (16, 32, 32, 64), (8, 256, 1536))
REPEATS = 15


def images() -> tuple[keras.Model, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """A ViT, and a function that makes a batch of a size."""
    model = keras_mp.prepare(vit(Size(4, 192, 3), 10, (64, 64, 3), 8), optimizer(), cross_entropy())
    return model, lambda size: (np.ones((size, 64, 64, 3), "float32"), np.zeros(size, "int32"))


def sentences() -> tuple[keras.Model, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """A classifier of sequences of any length, and a function that makes a batch of a length."""
    x = tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(256, 192)(x)
    for _ in range(4):
        x = keras.layers.LayerNormalization()(x + keras_mp.layers.SelfAttention(3)(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(192, "gelu")(x))
    y = keras.layers.Dense(2, dtype="float32")(keras.layers.GlobalAveragePooling1D()(x))
    model = keras_mp.prepare(keras.Model(tokens, y), optimizer(), cross_entropy())
    return model, lambda length: (np.ones((16, length), "int32"), np.zeros(16, "int32"))


def first_and_second(make: Callable[..., tuple], sizes: tuple[int, ...], shape: tuple) -> list[str]:
    """Milliseconds of the first and of the second step of each size, one graph for all."""
    keras.utils.set_random_seed(0)
    model, batch = make()
    specs = tf.TensorSpec(shape, batch(sizes[0])[0].dtype), tf.TensorSpec(shape[:1], tf.int32)
    wanted = iter([size for size in sizes for _ in range(2)])
    steps = iter(tf.data.Dataset.from_generator(lambda: map(batch, wanted), output_signature=specs))
    model.make_train_function()
    times = []
    for _ in range(2 * len(sizes)):
        started = time.perf_counter()
        model.train_function(steps)
        times.append(1e3 * (time.perf_counter() - started))
    # The graph itself is traced in the very first step.
    return [
        f"{size}: {first:.0f}, {second:.0f}" for size, first, second in zip(sizes, times[::2], times[1::2], strict=True)
    ]


KINDS = {
    "images in a batch": (images, (32, 20, 7), (None, 64, 64, 3)),
    "images in a batch, many sizes": (images, tuple(range(32, 11, -1)), (None, 64, 64, 3)),
    "tokens in a sequence": (sentences, LENGTHS, (None, None)),
}


def shapes(kind: str | None = None, islands: bool = True) -> None:
    """Prints the times of all kinds, or in a process of its own those of one."""
    if kind:
        keras_mp.set_global_policy("mixed_bfloat16")
        with nullcontext() if islands else backend.without_islands():
            print("   ", "; ".join(first_and_second(*KINDS[kind])))
        return
    for name in KINDS:
        for way in ("islands", "kernels"):
            print(f"{name}, {way}; ms of the first and the second step:", flush=True)
            # A process each: one keeps the programs that it compiled.
            subprocess.run([sys.executable, __file__, "shapes", name, way], check=True, stderr=subprocess.DEVNULL)


def step_of(kind: Callable, islands: bool) -> Callable:
    """From (x, gradient of y) to y and the gradient of x."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with backend.step_scopes(gelu)(()) if islands else nullcontext(), tf.GradientTape() as tape:
            tape.watch(x)
            y = kind(x)
        return y, tape.gradient(y, x, upstream)

    return step


def seconds(step: Callable, x: tf.Tensor, upstream: tf.Tensor) -> float:
    """Of one call."""
    started = time.perf_counter()
    for _ in range(REPEATS):
        result = step(x, upstream)
    result[1].numpy()
    return (time.perf_counter() - started) / REPEATS


def activations() -> None:
    """Prints a line for each function, dtype and shape."""
    for name, kind in ACTIVATIONS.items():
        for dtype in ("bfloat16", "float32"):
            for shape in ACTIVATION_SHAPES:
                x, upstream = (tf.cast(tf.random.normal(shape), dtype) for _ in range(2))
                both = [step_of(kind, islands) for islands in (True, False)]
                for step in both:
                    step(x, upstream)
                rounds = [[seconds(step, x, upstream) for step in both] for _ in range(7)]
                ratios = sorted(island / own for island, own in rounds)
                own = sorted(own for _, own in rounds)[3]
                print(f"{name}, {dtype}, {shape}: {ratios[3]:.2f} of {own * 1e3:.2f} ms", flush=True)


def losses(recipe: str, seed: int, steps: int, reorder: bool = False) -> list[float]:
    """The loss of each step."""
    order = np.random.default_rng(seed)
    module = RECIPES[recipe]
    config = getattr(module, recipe)()
    keras.utils.set_random_seed(seed)
    model = module.model_to_train(config, keras_mp.set_global_policy("mixed_bfloat16"), steps)
    data = module.batches(config)
    curve = []
    while len(curve) < steps:
        data.start_at(len(curve) // len(data))
        for index in range(min(len(data), steps - len(curve))):
            x, y = data[index]
            rows = order.permutation(len(x)) if reorder else np.arange(len(x))
            model.reset_metrics()
            curve.append(float(np.ravel(model.train_on_batch(x[rows], y[rows]))[0]))
    return curve


def curves(recipe: str, steps: int, seed_count: int) -> None:
    """Prints the last losses, and draws the picture."""
    seeds = range(seed_count)
    runs_of = {ISLANDS: [losses(recipe, seed, steps) for seed in seeds]}
    with backend.without_islands():
        runs_of[KERNELS] = [losses(recipe, seed, steps) for seed in seeds]
        runs_of[REORDERED] = [losses(recipe, seed, steps, reorder=True) for seed in seeds]
    smooth = {
        name: [np.convolve(curve, np.full(AVERAGED, 1 / AVERAGED), "valid").tolist() for curve in runs]
        for name, runs in runs_of.items()
    }
    picture = difference_picture(
        smooth,
        KERNELS,
        x_title="step",
        y_title=f"{recipe}: training loss less that of TensorFlow's kernels, mean of the seeds",
        first=AVERAGED,
    )
    (DOCS / f"islands-{recipe}.svg").write_text(picture)
    tail = max(1, steps // 10)
    for name, runs in runs_of.items():
        ends = [float(np.mean(run[-tail:])) for run in runs]
        print(f"{recipe}, {name}: the mean loss of the last {tail} of {steps} steps, a seed each:")
        print("   ", ", ".join(f"{end:.4f}" for end in ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shapes", "activations", "curves"))
    parser.add_argument("of", nargs="*", help="of curves: a recipe; of shapes: one kind, and islands or kernels")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "curves":
        curves(options.of[0], options.steps, options.seeds)
    elif options.what == "activations":
        activations()
    else:
        shapes(*options.of[:1], islands=options.of[1:] != ["kernels"])


if __name__ == "__main__":
    main()
