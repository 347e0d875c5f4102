"""What FP8 costs: signal to quantization noise of the cast and of the three products, as a Markdown table.

    python benchmarks/fp8_sqnr.py

Hardware: any; a GPU with FP8 and a CPU that emulates it add up the same products. Time: 10 seconds on 2 cores.
Expect, for N(0, 1): cast 31.5 dB, forward 28.5, gradients 24.3 to 24.6.

SQNR is 10 log10(sum of squares / sum of squared errors), against the products of the unrounded operands in float64.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable

import keras
import numpy as np

from keras_mp.fp8 import CurrentScaling, matmul

INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "N(0, 1)": lambda rng, shape: rng.normal(size=shape),
    "N(0, 1), gradients x 1e-6": lambda rng, shape: rng.normal(size=shape),
    "Student t, 3 degrees": lambda rng, shape: rng.standard_t(3, size=shape),
    "log-normal, sigma 2": lambda rng, shape: rng.choice([-1, 1], size=shape) * rng.lognormal(0, 2, size=shape),
    "N(0, 1), 1 of 1000 x 1000": lambda rng, shape: rng.normal(size=shape) * np.where(rng.random(shape) < 1e-3, 1e3, 1),
}
RECIPES = {
    "hybrid": CurrentScaling(),
    "hybrid, powers of two": CurrentScaling(power_of_two=True),
    "E4M3": CurrentScaling("E4M3"),
}


def decibels(actual, exact: np.ndarray) -> float:
    """The SQNR of an approximation."""
    error = keras.ops.convert_to_numpy(actual).astype("float64") - exact
    return 10 * float(np.log10(np.sum(exact**2) / np.sum(error**2)))


def gradients(recipe: CurrentScaling, x, w, g) -> tuple:
    """The product, and its gradients for the upstream gradient g."""
    if keras.backend.backend() == "jax":
        import jax

        result, backward = jax.vjp(lambda x, w: matmul(x, w, recipe), x, w)
        return (result, *backward(g))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch([x, w])
        result = matmul(x, w, recipe)
    return (result, *tape.gradient(result, [x, w], output_gradients=g))


def main() -> None:
    """Prints the table."""
    rng = np.random.default_rng(0)
    print("| values | size | recipe | cast | forward | input gradient | kernel gradient |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name, draw in INPUTS.items():
        for size in (64, 1024):
            arrays = [draw(rng, (size, size)).astype("float32") for _ in range(3)]
            if "1e-6" in name:
                arrays[2] *= np.float32(1e-6)
            x, w, g = (array.astype("float64") for array in arrays)
            exact = (x @ w, g @ w.T, x.T @ g)
            for label, recipe in RECIPES.items():
                tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
                values, scale = recipe.quantize(tensors[0], "input")
                found = [decibels(keras.ops.cast(values, "float32") / scale, x)]
                found += [decibels(*pair) for pair in zip(gradients(recipe, *tensors), exact, strict=True)]
                cells = " | ".join(f"{value:.1f}" for value in found)
                print(f"| {name} | {size} | {label} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
