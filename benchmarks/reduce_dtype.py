"""What summing gradients in bfloat16 costs: `language_model` on 4 devices, the last loss in both dtypes, by seed.

    NPROC=32 XLA_FLAGS=--xla_force_host_platform_device_count=4 KERAS_BACKEND=jax python benchmarks/reduce_dtype.py

The loss is the mean over the last 20 of the steps, in nats a byte, on text that the model has not seen before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from step_losses import StepLosses

import keras_mp
from recipes.language_model import Config, batches, build


def last_loss(seed: int, reduce_dtype: str, steps: int) -> float:
    """Trains on `steps` different batches and returns the loss at the end."""
    config = Config(sequence_length=32, layers=2, width=64, heads=2, batch_size=16, seed=seed)
    keras.utils.set_random_seed(seed)
    data = batches(config)
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*(data[step] for step in range(steps)), strict=True))
    losses = StepLosses()
    with keras_mp.distribute("data", 4, reduce_dtype=reduce_dtype):
        model = build(config)
        inner = keras.optimizers.AdamW(1e-3, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0)
        optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.NoLossScale())
        model.compile(optimizer, keras_mp.ChunkedCrossEntropy())
        model.fit(inputs, targets, batch_size=16, shuffle=False, verbose=0, callbacks=[losses])
    return losses.last(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_bfloat16")
    print("| seed | summed in float32 | in bfloat16 |\n| --- | --- | --- |")
    for seed in range(arguments.seeds):
        losses = [last_loss(seed, dtype, arguments.steps) for dtype in ("float32", "bfloat16")]
        print(f"| {seed} | {losses[0]:.4f} | {losses[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
