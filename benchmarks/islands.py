"""The cost of islands where shapes change: a last batch that is smaller, many batch sizes, and lengths that vary.

    python benchmarks/islands.py
    python benchmarks/islands.py --kind "images in a batch"

On TensorFlow, on a CPU. For each of the first batch sizes two programs are compiled for each kind of normalization and
activation; the operations of later sizes, and of lengths that are unknown when the step is traced, are kernels.
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
from models.transformer import Size
from models.vit import vit

LENGTHS = (48, 64, 80, 96, 112, 128)


def images() -> tuple[keras.Model, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """A ViT, and a function that makes a batch of a size."""
    model = keras_mp.prepare(vit(Size(4, 192, 3), 10, (64, 64, 3), 8), optimizer(), cross_entropy())
    return model, lambda size: (np.ones((size, 64, 64, 3), "float32"), np.zeros(size, "int32"))


def sentences() -> tuple[keras.Model, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """A classifier of sequences of any length, and a function that makes a batch of a length."""
    x = tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(256, 192)(x)
    for _ in range(4):
        x = keras.layers.LayerNormalization()(x + keras_mp.SelfAttention(3)(x))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, help="one alone; by default all, with islands and without")
    parser.add_argument("--without-islands", action="store_true", help="of the one kind")
    options = parser.parse_args()
    if options.kind is not None:
        keras_mp.set_global_policy("mixed_bfloat16")
        with keras_mp.backend.without_islands() if options.without_islands else nullcontext():
            print("   ", "; ".join(first_and_second(*KINDS[options.kind])))
        return
    for kind in KINDS:
        for without in ([], ["--without-islands"]):
            print(
                f"{kind}, {'without' if without else 'with'} islands; ms of the first and the second step:", flush=True
            )
            # A process each: one keeps the programs that it compiled.
            subprocess.run([sys.executable, __file__, "--kind", kind, *without], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
