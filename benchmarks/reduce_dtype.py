"""What summing gradients in bfloat16 and gathering weights in one byte cost: the last loss of `language_model`.

    NPROC=32 XLA_FLAGS=--xla_force_host_platform_device_count=8 KERAS_BACKEND=jax python benchmarks/reduce_dtype.py
    KERAS_BACKEND=jax python benchmarks/reduce_dtype.py --errors

The loss is the mean over the last 20 of the steps, in nats a byte, on text that the model has not seen before.

`--errors` compares sums of gradients with their float64 sum. The summands are the gradients of 16 and of 256 shards of
a batch, at the start of a training and after 200 steps, as the devices of a slice would have them: float32, rounded to
bfloat16 before they are sent. The sums are emulated in NumPy: on a ring each device adds its summand to what arrives,
and rounds to bfloat16 what it sends on; in two hops so do rings of 4 (16) devices, and then rings of what these have
made. An error is the norm of the difference over all weights, relative to that of the sum; so is the sampling error,
the standard deviation of the batch's gradient, from the spread of the shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import ml_dtypes
import numpy as np
from step_losses import StepLosses

import keras_mp
from recipes.language_model import Config, batches, build

SETTINGS = {
    "float32, 16 bits": {},
    "bfloat16, 16 bits": {"reduce_dtype": "bfloat16"},
    "float32, one byte": {"gather_dtype": "float8"},
    "bfloat16, one byte": {"reduce_dtype": "bfloat16", "gather_dtype": "float8"},
}
HOPS = {16: (4, 4), 256: (16, 16)}


def compiled_model(config: Config) -> keras.Model:
    """The model of the training recipe, small."""
    model = build(config)
    inner = keras.optimizers.AdamW(1e-3, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0)
    model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none()), keras_mp.lean.ChunkedCrossEntropy())
    return model


def text(config: Config, steps: int) -> tuple[np.ndarray, ...]:
    """The inputs and targets of so many batches."""
    data = batches(config)
    return tuple(np.concatenate(arrays) for arrays in zip(*(data[step] for step in range(steps)), strict=True))


def config_of(seed: int, rows: int = 16) -> Config:
    """The size of the model, and of a batch."""
    return Config(sequence_length=32, layers=2, width=64, heads=2, batch_size=rows, seed=seed)


def last_loss(seed: int, settings: dict[str, str], steps: int) -> float:
    """Trains on `steps` different batches and returns the loss at the end."""
    config = config_of(seed)
    keras.utils.set_random_seed(seed)
    inputs, targets = text(config, steps)
    losses = StepLosses()
    with keras_mp.parallel.distribute("fully_sharded", 8, **settings):
        model = compiled_model(config)
        model.fit(inputs, targets, batch_size=16, shuffle=False, verbose=0, callbacks=[losses])
    return losses.last(20)


def gradients_of_shards(model: keras.Model, inputs: np.ndarray, targets: np.ndarray, shards: int) -> np.ndarray:
    """What each device adds to the sum, shape (shards, weights): a part of the gradient of the mean loss."""
    import jax

    trainable = [variable.value for variable in model.trainable_variables]
    passive = [variable.value for variable in model.non_trainable_variables]
    optimizer = [variable.value for variable in model.optimizer.variables]

    @jax.jit
    def gradient(x, y):
        def loss(trainable):
            computed = model.compute_loss_and_updates(
                trainable, passive, [], x, y, None, training=True, optimizer_variables=optimizer
            )
            return computed[0] / shards

        return jax.grad(loss)(trainable)

    parts = zip(np.split(inputs, shards), np.split(targets, shards), strict=True)
    flat = [np.concatenate([np.asarray(array, "float32").ravel() for array in gradient(x, y)]) for x, y in parts]
    return np.stack(flat)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16, ties to even, as float32."""
    return x.astype("float32").astype(ml_dtypes.bfloat16).astype("float32")


def ring(summands: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The sum over the first axis, as the devices of a ring make it.

    Args:
        summands: shape (devices, weights). Each device ends with one of as many parts of the weights; its sum begins
            with the summand of the device behind it, and goes around.
        rounded: a function that is applied to what is sent.
    """
    devices, weights = summands.shape
    parts = np.pad(summands, ((0, 0), (0, -weights % devices))).reshape(devices, devices, -1)
    owners = np.arange(devices)
    total = rounded(parts[(owners + 1) % devices, owners])
    for step in range(2, devices + 1):
        total = rounded(total + rounded(parts[(owners + step) % devices, owners]))
    return total.reshape(-1)[:weights]


def in_hops(summands: np.ndarray, hops: tuple[int, ...], rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The same over one dimension of a slice after the other; device i * hops[1] + j has the place (i, j)."""
    for size in hops:
        groups = summands.reshape(size, -1, summands.shape[1])
        summands = np.stack([ring(groups[:, place], rounded) for place in range(groups.shape[1])])
    return summands[0]


def errors(seed: int, steps: int) -> None:
    """Prints the table of sums."""
    print("| shards | after steps | as sent | error of the sum | worst weight array | sampling error |")
    print("| ---: | ---: | --- | ---: | ---: | ---: |")
    keras.utils.set_random_seed(seed)
    config = config_of(seed)
    model = compiled_model(config)
    for done in (0, steps):
        if done:
            inputs, targets = text(config, steps)
            model.fit(inputs, targets, batch_size=16, shuffle=False, verbose=0)
        sizes = np.cumsum([int(np.prod(variable.shape)) for variable in model.trainable_variables])[:-1]
        for shards, hops in HOPS.items():
            summands = gradients_of_shards(model, *text(config_of(seed + 1, 2 * shards), 1), shards)
            exact = summands.astype("float64").sum(0)
            spread = np.sqrt(shards * summands.astype("float64").var(0, ddof=1).sum()) / np.linalg.norm(exact)
            sums = {
                "exact sum, rounded once": bfloat16(exact),
                "float32 sum of bfloat16 summands, rounded once": bfloat16(bfloat16(summands).sum(0)),
                "bfloat16 ring, one hop": ring(summands, bfloat16),
                f"bfloat16 ring, two hops of {hops[0]}": in_hops(summands, hops, bfloat16),
                "float32 ring, one hop": ring(summands, lambda x: x.astype("float32")),
            }
            for name, total in sums.items():
                error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
                pairs = zip(np.split(total, sizes), np.split(exact, sizes), strict=True)
                worst = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs if np.any(b))
                print(f"| {shards} | {done} | {name} | {error:.2e} | {worst:.2e} | {spread:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--errors", action="store_true", help="compare sums of gradients with float64 instead")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_bfloat16")
    if arguments.errors:
        errors(0, arguments.steps)
        return
    print(f"| seed | {' | '.join(SETTINGS)} |\n| ---: |{' ---: |' * len(SETTINGS)}")
    for seed in range(arguments.seeds):
        losses = [last_loss(seed, settings, arguments.steps) for settings in SETTINGS.values()]
        print(f"| {seed} | {' | '.join(f'{loss:.4f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
