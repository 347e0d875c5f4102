"""The signal-to-quantization-noise ratio of FP8 and INT8, of the cast and the three products, by scaling.

    python benchmarks/fp8_sqnr.py

Hardware: any; a GPU with FP8 and a CPU that emulates it add up the same products. Time: 20 seconds on 2 cores.
Expect, for N(0, 1): cast 31.5 dB, forward 28.5, gradients 24.6, or 28.5 in E4M3.

SQNR is 10 log10(sum of squares / sum of squared errors), against products of the unrounded operands in float64. The
last column is the median of that of each row of the result: what an ordinary row sees. Delayed and static
scales have seen 16 steps of the same distribution before, but for the last rows.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable

import keras
import numpy as np

from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.block_scaled import dequantize_rows, quantize_matrix
from keras_mp.fp8.quantize import known_of, quantize

SIZE = 1024
STEPS = 16


def outlier(axis: int, factor: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Normal values, and 8 rows or columns that are larger."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        x = rng.normal(size=(SIZE, SIZE))
        place = [slice(None), slice(None)]
        place[axis] = rng.choice(SIZE, 8, replace=False)
        x[tuple(place)] *= factor
        return x

    return draw


# Of the inputs; the kernel is normal, and the gradient drawn as the inputs are where they are of one kind throughout.
INPUTS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "N(0, 1)": lambda rng: rng.normal(size=(SIZE, SIZE)),
    "tiny: N(0, 1e-6)": lambda rng: 1e-6 * rng.normal(size=(SIZE, SIZE)),
    "heavy tails: Student t, 3 degrees": lambda rng: rng.standard_t(3, size=(SIZE, SIZE)),
    "heavy tails: log-normal, sigma 2": lambda rng: rng.normal(size=(SIZE, SIZE)) * rng.lognormal(0, 2, (SIZE, SIZE)),
    "8 outlier channels, 100 times": outlier(1, 100.0),
    "8 outlier channels, 10,000 times": outlier(1, 1e4),
    "8 outlier rows, 10,000 times": outlier(0, 1e4),
    "N(0, 1), after steps of N(0, 1/64)": lambda rng: rng.normal(size=(SIZE, SIZE)),
}

RECIPES = {
    "current": Scalings.named("current"),
    "delayed": Scalings.named("delayed"),
    "static": Scalings.named("static"),
    "rowwise": Scalings.named("rowwise"),
    "current, E4M3": Scalings.named("current", format="E4M3"),
    "MXFP8": Scalings.named("mxfp8"),
    "MXFP8, scales rounded down": Scalings.named("mxfp8", scale="E8M0_floor"),
    "NVFP4": Scalings.named("nvfp4"),
    "NVFP4, nearest": Scalings.named("nvfp4", rounding="nearest"),
    "INT8, delayed": Scalings.named("int8", kernel_gradient=True),
    "INT8, current": Scalings.named("int8_current", kernel_gradient=True),
}


def decibels(actual: np.ndarray, exact: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The SQNR of an approximation."""
    return 10 * np.log10(np.sum(exact**2, axis) / np.sum((actual - exact) ** 2, axis))


def products(recipe, x, w, g, history) -> tuple:
    """The product, and its gradients for the upstream gradient g."""
    if keras.backend.backend() == "jax":
        import jax

        result, backward = jax.vjp(lambda x, w: matmul(x, w, recipe, history=history), x, w)
        return (result, *backward(g))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch([x, w])
        result = matmul(x, w, recipe, history=history)
    return (result, *tape.gradient(result, [x, w], output_gradients=g))


def rounded(x, recipe: Scalings, history):
    """The inputs as the forward product reads them, in float32."""
    scaling = recipe.of("input")[0]
    if scaling.in_blocks:
        blocks = quantize_matrix(x, scaling, 1)
        return dequantize_rows(blocks) * (1.0 if blocks.factor is None else blocks.factor)
    values, scale = quantize(x, scaling, known=known_of(history, "input", recipe))
    return keras.ops.cast(values, "float32") / scale


def known(recipe: Scalings, amaxes: list[list[float]]) -> np.ndarray | None:
    """The history that a recipe has after these steps."""
    columns = recipe.kept
    if not columns + recipe.counts:
        return None
    rows = np.array(amaxes, "float32")
    if columns < STEPS:  # static scales keep the largest, in the second place
        rows = np.stack([np.zeros(3), rows.max(axis=1)], axis=1)[:, :columns]
    counted = [rows, np.full((3, 1), STEPS)] if recipe.counts else [rows]
    return np.concatenate(counted, axis=1).astype("float32")


def main() -> None:
    """Prints the table."""
    rng = np.random.default_rng(0)
    names = ("cast", "forward", "input gradient", "kernel gradient", "forward, median row")
    print(f"| inputs and gradients | scaling | {' | '.join(names)} |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, draw in INPUTS.items():
        arrays = [array.astype("float32") for array in (draw(rng), rng.normal(size=(SIZE, SIZE)), draw(rng))]
        x, w, g = (array.astype("float64") for array in arrays)
        exact = (x @ w, g @ w.T, x.T @ g)
        before = 1 / 64 if "after" in name else 1.0
        amaxes = [[np.max(np.abs(before * draw(rng))) for _ in range(STEPS)] for _ in range(3)]
        amaxes[1] = [np.max(np.abs(w))] * STEPS
        for label, recipe in RECIPES.items():
            tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
            steps = known(recipe, amaxes)
            history = None if steps is None else keras.ops.convert_to_tensor(steps)
            cast = keras.ops.convert_to_numpy(rounded(tensors[0], recipe, history)).astype("float64")
            computed = [keras.ops.convert_to_numpy(product) for product in products(recipe, *tensors, history)]
            cells = [decibels(cast, x)] + [decibels(*pair) for pair in zip(computed, exact, strict=True)]
            cells.append(np.median(decibels(computed[0], exact[0], axis=1)))
            print(f"| {name} | {label} | {' | '.join(f'{value:.1f}' for value in cells)} |", flush=True)


if __name__ == "__main__":
    main()
