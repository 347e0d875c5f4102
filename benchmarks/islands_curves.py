"""Trains a recipe's model with islands and with TensorFlow's kernels alone, on the same batches with the same seeds.

Islands sum in another order. What that does to a training is what another order of the rows within each batch does,
which changes nothing else: a third training, by kernels, has them so.

    python benchmarks/islands_curves.py digits
    python benchmarks/islands_curves.py language_model

Prints the losses at the end, and draws docs/islands-<recipe>.svg: the difference of the curves, beside how far the
seeds are from each other. On TensorFlow, on a CPU, in mixed_bfloat16.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np

import keras_mp
from keras_mp import backend
from keras_mp.reporting.pictures import difference_picture
from recipes import digits, language_model

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECIPES = {"digits": digits, "language_model": language_model}
KERNELS, ISLANDS, REORDERED = "TensorFlow's kernels", "with islands", "reordered rows"
AVERAGED = 4  # steps of a point of the picture


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = range(options.seeds)
    curves = {ISLANDS: [losses(options.recipe, seed, options.steps) for seed in seeds]}
    with backend.without_islands():
        curves[KERNELS] = [losses(options.recipe, seed, options.steps) for seed in seeds]
        curves[REORDERED] = [losses(options.recipe, seed, options.steps, reorder=True) for seed in seeds]
    smooth = {
        name: [np.convolve(curve, np.full(AVERAGED, 1 / AVERAGED), "valid").tolist() for curve in runs]
        for name, runs in curves.items()
    }
    picture = difference_picture(
        smooth,
        KERNELS,
        x_title="step",
        y_title=f"{options.recipe}: training loss less that of TensorFlow's kernels, mean of the seeds",
        first=AVERAGED,
    )
    (DOCS / f"islands-{options.recipe}.svg").write_text(picture)
    tail = max(1, options.steps // 10)
    for name, runs in curves.items():
        ends = [float(np.mean(run[-tail:])) for run in runs]
        print(f"{options.recipe}, {name}: the mean loss of the last {tail} of {options.steps} steps, a seed each:")
        print("   ", ", ".join(f"{end:.4f}" for end in ends))


if __name__ == "__main__":
    main()
