"""The step that the benchmarks of FP8 time or compile."""

import jax

from keras_mp.fp8 import get_recipe, matmul


def step(recipe):
    """Forward and backward of a product, as a function of inputs, kernel, upstream gradient and history.

    Args:
        recipe: "bfloat16", or a scaling recipe or its name.
    """

    def run(x, w, g, history=None):
        if recipe == "bfloat16":
            y, backward = jax.vjp(lambda x, w: x @ w.astype(x.dtype), x, w)
        elif get_recipe(recipe).history_length or get_recipe(recipe).counts_steps:
            y, backward = jax.vjp(lambda x, w, history: matmul(x, w, recipe, history=history), x, w, history)
        else:
            y, backward = jax.vjp(lambda x, w: matmul(x, w, recipe), x, w)
        return y, backward(g)

    return run
