"""The step that the benchmarks of FP8 and INT8 time or compile."""

import functools

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.common.lowered import Lowered
from keras_mp.fp8 import get_recipe, matmul
from keras_mp.fp8.convolution import convolution
from keras_mp.fp8.window import Window


def kept(recipe) -> tuple[int, int]:
    """The shape of the history that a scaling recipe keeps; () where it keeps none."""
    recipe = get_recipe(recipe)
    columns = recipe.history_length + recipe.counts_steps
    return (3, columns) if columns else ()


def step(recipe):
    """Forward and backward of a product, as a function of inputs, kernel, upstream gradient and history.

    Args:
        recipe: "bfloat16", or a scaling recipe or its name.
    """

    def run(x, w, g, history=None):
        if recipe == "bfloat16":
            y, backward = jax.vjp(lambda x, w: x @ w.astype(x.dtype), x, w)
        elif kept(recipe):
            y, backward = jax.vjp(lambda x, w, history: matmul(x, w, recipe, history=history), x, w, history)
        else:
            y, backward = jax.vjp(lambda x, w: matmul(x, w, recipe), x, w)
        return y, backward(g)

    return run


def convolution_step(recipe):
    """As `step`, of a convolution with a kernel of 3 by 3 and a stride of 1."""

    def plain(x, w):
        return keras.ops.conv(x, w.astype(x.dtype), 1, "same", "channels_last")

    def run(x, w, g, history=None):
        if recipe == "bfloat16":
            y, backward = jax.vjp(plain, x, w)
            return y, backward(g)
        window = Window((3, 3), (1, 1), (1, 1), True)
        options = {"dtype": "bfloat16", "path": "", "part": None}
        convolve = functools.partial(convolution, recipe=recipe, window=window, **options)
        y, backward = jax.vjp(lambda x, w, history: convolve(x, w, history=history), x, w, history)
        return y, backward(g)

    return run


def lowered(recipe, shape: tuple[int, int, int], platform: str) -> Lowered:
    """The step for a layer of so many rows, inputs and outputs: bfloat16 inputs and gradient, float32 kernel.

    Args:
        recipe: as of `step`.
        shape: rows, inputs, outputs.
        platform: "tpu" or "cuda".
    """
    rows, inputs, outputs = shape
    sizes = [(rows, inputs), (inputs, outputs), (rows, outputs)]
    return _lowered(step(recipe), recipe, sizes, platform)


def lowered_convolution(recipe, shape: tuple[int, int, int, int], platform: str) -> Lowered:
    """The step for a Conv2D layer of batch, length of both sides, channels and filters; dtypes as of `lowered`."""
    batch, side, channels, filters = shape
    sizes = [(batch, side, side, channels), (3, 3, channels, filters), (batch, side, side, filters)]
    return _lowered(convolution_step(recipe), recipe, sizes, platform)


def _lowered(run, recipe, sizes: list[tuple[int, ...]], platform: str) -> Lowered:
    arguments = list(zip(sizes, ("bfloat16", "float32", "bfloat16"), strict=True))
    if recipe != "bfloat16" and kept(recipe):
        arguments.append((kept(recipe), "float32"))
    structs = [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in arguments]
    program = jax.jit(run).trace(*structs).lower(lowering_platforms=(platform,))
    module = program.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    return Lowered(module.encode(), (), (), "jax", f"{recipe} {sizes}")
