"""A program that trains a small language model, alone or as one of several processes, and writes what it ended with.

python tests/parallel/together.py FOLDER PRECISION[:WORKER:STEP] [--epochs N] [--pause SECONDS] ...
"""

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import keras
import numpy as np

import keras_mp
from keras_mp import backend
from keras_mp.parallel import workers
from keras_mp.parallel.cluster import find_cluster
from keras_mp.training.fit_loop import fit
from recipes.common.interrupt import StopOnInterrupt

LENGTH, BATCH, SEQUENCES, PARTS = 8, 8, 40, 2


def read(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--reordered", action="store_true", help="the rows of each batch in reverse")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step, so that there is time to kill it")
    parser.add_argument("--gpt", action="store_true", help="the repository's model; a smaller one is traced sooner")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--silence", type=float, default=20.0)
    parser.add_argument("--join", type=float, default=60.0)
    return parser.parse_args(arguments)


class Planted(keras_mp.training.ShuffledBatches):
    """Bytes, the bytes that follow, and weights, infinite in the rows of one worker at one step."""

    plant = (-1, -1)
    reordered = False

    def batch(self, epoch, step):
        inputs, targets = super().batch(epoch, step)
        weights = np.ones(targets.shape, "float32")
        worker, planted = self.plant
        if planted == epoch * self.steps + step:
            rows = self.batch_size // PARTS
            weights[worker * rows : (worker + 1) * rows] = np.inf
        order = slice(None, None, -1 if self.reordered else 1)
        return inputs[order], targets[order], weights[order]

    def rows(self, epoch, step, first, last):
        if first == 0 and last == self.batch_size:
            return super().rows(epoch, step, first, last)
        return keras.tree.map_structure(lambda array: array[first:last], self.batch(epoch, step))


class Pause(keras.callbacks.Callback):
    supports_multiprocess = True

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds:
            print("step", flush=True)
            time.sleep(self.seconds)


def build(options, precision):
    if options.gpt:
        from models.gpt import gpt
        from models.transformer import Size

        model, loss = gpt(Size(1, 16, 2), 32, LENGTH, dropout=options.dropout), keras_mp.lean.ChunkedCrossEntropy()
    else:
        layers = [keras.layers.Embedding(32, 16), keras.layers.Dropout(options.dropout), keras.layers.Dense(16, "relu")]
        layers += [keras.layers.LayerNormalization(), keras.layers.Dense(32)]
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras_mp.stabilize(model)
    # With Adam's own epsilon of 1e-7 a gradient near 0 moves its weight a whole step one way or the other, as it was
    # rounded: rounding alone then makes distances that differ by ten times from one order of the rows to another.
    optimizer = keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=1.0, use_ema=True)
    scale = None if precision == "mixed_float16" else keras_mp.LossScale.none()
    loss_scale = {"initial_scale": 2.0**12, "growth_interval": 50} if scale is None else {}
    optimizer = keras_mp.LossScaleOptimizer(optimizer, scale, **loss_scale)
    jit = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, jit_compile=jit)
    return keras_mp.loss_scaling.atomic_skip(model)


def train(options, run):
    precision, *plant = run.split(":")
    folder = options.folder / run.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    keras.mixed_precision.set_global_policy(precision)
    keras.utils.set_random_seed(3)
    tokens = np.random.default_rng(4).integers(0, 32, (SEQUENCES + 6, LENGTH + 1), dtype=np.int32)
    batches = Planted(tokens[:SEQUENCES, :-1], tokens[:SEQUENCES, 1:], BATCH, seed=5)
    batches.plant, batches.reordered = tuple(map(int, plant)) or (-1, -1), options.reordered
    with keras_mp.parallel.distribute("data") if workers.count() > 1 else nullcontext():
        model = build(options, precision)
        history = keras.callbacks.History()
        saves = keras_mp.TrainingCheckpoint(folder / "checkpoints", batches, every=options.every, callbacks=[history])
        monitor = keras_mp.PrecisionMonitor(measure_gradients=False)  # which are those of the first replica
        with StopOnInterrupt() as interrupt:
            callbacks = [monitor, history, Pause(options.pause), interrupt, saves]
            fit(model, batches, options.epochs, (tokens[SEQUENCES:, :-1], tokens[SEQUENCES:, 1:]), 4, callbacks)
        values = {f"{i} {v.name}": backend.to_numpy(v) for i, v in enumerate(model.variables)}
        values |= {f"optimizer {i}": backend.to_numpy(v) for i, v in enumerate(model.optimizer.variables)}
        values["skipped"] = backend.to_numpy(model.optimizer.skipped_steps)
    logs = {f"logs {name}": np.asarray(each) for name, each in history.history.items()}
    np.savez(folder / f"ended-{workers.index()}.npz", **values, **logs)


if __name__ == "__main__":
    options = read(sys.argv[1:])
    asked = {name: value for name, value in vars(options).items() if name != "folder"}
    with workers.join(find_cluster(), asked, join_seconds=options.join, silence_seconds=options.silence):
        for run in options.runs:
            train(options, run)
