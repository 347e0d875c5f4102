"""How much of LoRA's contribution is left in a Dense layer's output: `python benchmarks/lora_product.py`, a minute.

A layer of 256 by 256 random weights gets LoRA matrices whose product is so small relative to the weights. The output's
change is projected on the change in float64; what is left is the share, the mean of some layers.
"""

import os
import sys
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np

import keras_mp

WIDTH, RANK, LAYERS = 256, 8, 4
POWERS = (-4, -8, -10, -12, -14)
# The policy, how the weights are quantized, and whether the layer is a stabilized model's output.
ROWS = (
    ("mixed_bfloat16", "", False),
    ("mixed_float16", "", False),
    ("bfloat16", "", False),
    ("mixed_bfloat16", "int4", False),
    ("mixed_bfloat16", "int8", False),
    ("mixed_bfloat16", "int4", True),
)


def share(policy: str, quantized: str, stabilized: bool, power: int, rng: np.random.Generator) -> float:
    """The share for one layer of random weights."""
    layer = keras.layers.Dense(WIDTH, use_bias=False, dtype=policy)
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    layer.kernel.assign(rng.normal(size=(WIDTH, WIDTH)))
    if quantized:
        layer.quantize(quantized)
    layer.enable_lora(RANK)
    if stabilized:
        model = keras_mp.stabilize(model)
        layer = model.layers[-1]
    x = keras.ops.cast(rng.normal(size=(64, WIDTH)), layer.compute_dtype)
    a, b = rng.normal(size=(WIDTH, RANK)), rng.normal(size=(RANK, WIDTH))
    b *= 2.0**power / np.std(a @ b)
    layer.lora_kernel_a.assign(a)
    before = np.asarray(model(x), "float64")
    layer.lora_kernel_b.assign(b * layer.lora_rank / layer.lora_alpha)
    change = np.asarray(model(x), "float64") - before
    true = np.asarray(keras.ops.cast(x, "float32"), "float64") @ a @ b
    return float(np.sum(change * true) / np.sum(true * true))


def main() -> None:
    rng = np.random.default_rng(0)
    print(f"| change / weights | {' | '.join(f'2^{power}' for power in POWERS)} |")
    print(f"| --- |{' ---: |' * len(POWERS)}")
    for policy, quantized, stabilized in ROWS:
        shares = [
            np.mean([share(policy, quantized, stabilized, power, rng) for _ in range(LAYERS)]) for power in POWERS
        ]
        name = ", ".join(filter(None, [policy, quantized, "the output layer after stabilize" if stabilized else ""]))
        print(f"| {name} | {' | '.join(f'{each:.0%}' for each in shares)} |")


if __name__ == "__main__":
    main()
