"""The training recipe language_model in NVFP4, beside MXFP8 and bfloat16: all its products, and its parts one by one.

    python benchmarks/nvfp4_training.py --seeds 1 --out build/nvfp4.json

Bits per byte on the test data after 5 epochs, 1,020 steps, of half its layers and width: on CPUs the products are
emulated. Runs that the file has already are not repeated.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import keras

import keras_mp
from keras_mp import convert
from keras_mp.fp8 import Scalings
from keras_mp.system.atomic_write import write_text
from recipes import language_model
from recipes.datasets.text import read, sequences, split

EPOCHS = 5
NVFP4 = Scalings.named("nvfp4")


SIZE = {"layers": 2, "width": 64, "sequence_length": 64, "batch_size": 32, "epochs": EPOCHS}

# The scalings, and after how many epochs the forward product is in bfloat16.
VARIANTS = {
    "bfloat16": (None, EPOCHS),
    "MXFP8": (Scalings.named("mxfp8"), EPOCHS),
    "NVFP4": (NVFP4, EPOCHS),
    "NVFP4, the last fifth forward in bfloat16": (NVFP4, EPOCHS - 1),
    "NVFP4 without the transform": (Scalings.named("nvfp4", transform="none"), EPOCHS),
    "NVFP4 rounded to the nearest": (Scalings.named("nvfp4", rounding="nearest"), EPOCHS),
}


def bits_per_byte(variant: str, seed: int) -> float:
    """Trains once."""
    scalings, last = VARIANTS[variant]
    keras.utils.clear_session()
    config = dataclasses.replace(
        language_model.language_model(), policy="fp8" if scalings else "mixed_bfloat16", seed=seed, **SIZE
    )
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(seed)
    data = language_model.batches(config)
    _, held_out = split(read(config.corpus), config.sequence_length)
    test = sequences(held_out, config.sequence_length)
    model = language_model.model_to_train(config, choice, EPOCHS * data.steps)
    if scalings:
        keras_mp.revert(model, "convert")
        convert(model, scalings, select=lambda path, layer: True)
    for epoch in range(EPOCHS):
        if epoch == last:
            convert(model, dataclasses.replace(scalings, forward=None))
        model.fit(data, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    loss = model.evaluate(*test, batch_size=config.batch_size, verbose=0)
    return float(loss if isinstance(loss, float) else loss[0]) / math.log(2)


def table(runs: dict[str, list[float]]) -> str:
    """As Markdown."""
    seeds = max(map(len, runs.values()))
    plain = sum(runs["bfloat16"]) / len(runs["bfloat16"])
    lines = ["| | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " | mean | relative to bfloat16 |"]
    lines.append("| --- |" + " ---: |" * (seeds + 2))
    for name, values in runs.items():
        mean = sum(values) / len(values)
        cells = [f"{value:.4f}" for value in values] + [f"{mean:.4f}", f"{mean / plain - 1:+.2%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, read and written")
    options = parser.parse_args()
    runs: dict[str, list[float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in range(options.seeds):
        for variant in VARIANTS:
            done = runs.setdefault(variant, [])
            if len(done) > seed:
                continue
            done.append(bits_per_byte(variant, seed))
            write_text(json.dumps(runs, indent=1) + "\n", options.out)
            print(f"seed {seed}, {variant}: {done[-1]:.4f}", flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
