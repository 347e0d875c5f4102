"""What optimizer states in 8 bits and weights in bfloat16 cost in training: the last loss by seed, and beside others.

    python benchmarks/small_states_training.py --markdown language_model digits peers

`language_model` and `digits` train the recipes' models small, three seeds each: the mean over the last tenth of the
steps of the training loss, its mean over the seeds, and their spread, largest less smallest. `peers` takes the
gradients of a float32 training step by step to AdamW with 8-bit states of several kinds, and says how far their weights
end from float32's: root mean square of the difference over that of how far float32's have moved. Needs TensorFlow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from step_losses import StepLosses

import keras_mp
from recipes import digits, language_model

# policy, state_dtype, weight_rounding
WAYS = {
    "float32 states": ("mixed_bfloat16", "float32", "stochastic"),
    "bfloat16 states": ("mixed_bfloat16", "bfloat16", "stochastic"),
    "float8 states": ("mixed_bfloat16", "float8", "stochastic"),
    "bfloat16 weights, stochastic rounding": ("bfloat16", "float32", "stochastic"),
    "bfloat16 weights, nearest rounding": ("bfloat16", "float32", "nearest"),
    "bfloat16 weights, stochastic, float8 states": ("bfloat16", "float8", "stochastic"),
}


def task(recipe: str, seed: int) -> tuple[Any, Callable[[], keras.Model], Any, float]:
    """The batches of a recipe, its model, its loss and its learning rate, at a size for a laptop."""
    if recipe == "language_model":
        config = language_model.Config(sequence_length=64, layers=2, width=128, heads=2, batch_size=16, seed=seed)
        return (
            language_model.batches(config),
            lambda: language_model.build(config),
            keras_mp.lean.ChunkedCrossEntropy(),
            2e-3,
        )
    config = digits.Config(batch_size=32, seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return digits.batches(config), lambda: digits.build(config, augment=False), loss, 2e-3


def last_loss(recipe: str, way: str, seed: int, steps: int) -> float:
    """Trains, and returns the loss at the end."""
    policy, state_dtype, weight_rounding = WAYS[way]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    data, build, loss, learning_rate = task(recipe, seed)
    pairs = [data[step % len(data)] for step in range(steps)]
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    keras.config.set_dtype_policy(policy)
    schedule = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=learning_rate, warmup_steps=steps // 10)
    inner = keras.optimizers.AdamW(schedule, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0)
    optimizer = keras_mp.LossScaleOptimizer(
        inner, keras_mp.LossScale.none(), state_dtype=state_dtype, weight_rounding=weight_rounding, rounding_seed=seed
    )
    model = keras_mp.prepare(build(), optimizer, loss)
    losses = StepLosses()
    model.fit(x, y, batch_size=len(pairs[0][0]), shuffle=False, verbose=0, callbacks=[losses])
    return losses.last(steps // 10)


def train(recipe: str, seeds: int, steps: int) -> None:
    """Prints a table of the losses of a recipe."""
    print(f"\n| {recipe}, {steps} steps | {' | '.join(f'seed {seed}' for seed in range(seeds))} | mean | spread |")
    print(f"| --- |{' ---: |' * (seeds + 2)}")
    for way in WAYS:
        found = [last_loss(recipe, way, seed, steps) for seed in range(seeds)]
        cells = [f"{value:.4f}" for value in (*found, np.mean(found), max(found) - min(found))]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of Dettmers's dynamic 8-bit type (arXiv:1511.04561, 2110.02861), sorted."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values + [0.0] * (256 - len(values)), "float32"))


def in_blocks(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Stores and reads back in blocks of 256, rounded to a table's nearest value: as bitsandbytes and torchao."""
    flat = np.pad(x.ravel(), (0, -x.size % 256)).reshape(-1, 256)
    scale = np.abs(flat).max(-1, keepdims=True)
    scaled = flat / np.maximum(scale, 1e-12)
    place = np.searchsorted((table[1:] + table[:-1]) / 2, scaled)
    return (table[place] * scale).ravel()[: x.size].reshape(x.shape).astype("float32")


class InNumpy:
    """AdamW whose moments pass through a format after each step."""

    def __init__(self, weights: list[np.ndarray], m: Callable[..., Any], v: Callable[..., Any]) -> None:
        self.weights, self.formats, self.steps = [w.copy() for w in weights], (m, v), 0
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]

    def apply(self, grads: list[np.ndarray]) -> None:
        """Makes a step, as keras.optimizers.AdamW does."""
        self.steps += 1
        rate = RATE * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for index, (w, gradient, (m, v)) in enumerate(zip(self.weights, grads, self.moments, strict=True)):
            m = m + (gradient - m) * np.float32(0.1)
            v = v + (np.square(gradient) - v) * np.float32(0.001)
            w -= np.float32(RATE * 0.01) * w
            w -= np.float32(rate) * m / (np.sqrt(v) + np.float32(1e-7))
            self.moments[index] = tuple(f(x) for f, x in zip(self.formats, (m, v), strict=True))


RATE = 1e-3


def peers(steps: int) -> None:
    """Prints how far 8-bit AdamWs end from float32's, on the gradients of a float32 training."""
    import tensorflow as tf

    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    data, build, loss, _ = task("language_model", 0)
    model = build()
    kept = [v for v in model.trainable_variables if len(v.shape) > 1 and np.prod(v.shape) >= 4096]
    exact = keras.optimizers.AdamW(RATE, weight_decay=0.01)
    start = [v.numpy() for v in kept]

    def ours(**settings: Any) -> tuple[Any, list[keras.Variable]]:
        own = [keras.Variable(value, name=f"weight_{index}") for index, value in enumerate(start)]
        inner = keras.optimizers.AdamW(RATE, weight_decay=0.01)
        optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none(), **settings)
        optimizer.build(own)
        return tf.function(lambda grads: optimizer.apply(grads, own)), own

    signed, unsigned = dynamic_map(True), dynamic_map(False)
    mine = {f"keras_mp, state_dtype={name!r}": ours(state_dtype=name) for name in ("float8", "bfloat16")}
    others = {
        "float32, in NumPy": InNumpy(start, lambda x: x, lambda x: x),
        "blocks of 256, dynamic 8-bit, nearest (bitsandbytes, torchao)": InNumpy(
            start, lambda x: in_blocks(x, signed), lambda x: in_blocks(x, unsigned)
        ),
    }

    @tf.function
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(value, [v.value for v in model.trainable_variables])]

    places = [next(i for i, v in enumerate(model.trainable_variables) if v is one) for one in kept]
    for step in range(steps):
        grads = gradients(*map(tf.constant, data[step % len(data)]))
        exact.apply(grads, model.trainable_variables)
        own = [grads[place] for place in places]
        for apply, _ in mine.values():
            apply(own)
        for other in others.values():
            other.apply([gradient.numpy() for gradient in own])

    def flat(weights: list[Any]) -> np.ndarray:
        return np.concatenate([np.asarray(w, "float64").ravel() for w in weights])

    reference = flat([v.numpy() for v in kept])
    moved = np.sqrt(np.mean((reference - flat(start)) ** 2))
    print(f"\n| AdamW, {steps} steps on the same gradients | distance from float32's weights, of how far they moved |")
    print("| --- | ---: |")
    weights = {name: [v.numpy() for v in own] for name, (_, own) in mine.items()}
    weights |= {name: other.weights for name, other in others.items()}
    for name, values in weights.items():
        print(f"| {name} | {np.sqrt(np.mean((flat(values) - reference) ** 2)) / moved:.2%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=("language_model", "digits", "peers"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="begin with the command, as the page shows it")
    arguments = parser.parse_args()
    if arguments.markdown:
        options = f"--steps {arguments.steps} --seeds {arguments.seeds} {' '.join(arguments.what)}"
        versions = f"{keras.backend.backend()}, keras {keras.__version__}"
        print(f"`python benchmarks/small_states_training.py {options}`, {versions}")
    for what in arguments.what:
        if what == "peers":
            peers(arguments.steps)
        else:
            train(what, arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
