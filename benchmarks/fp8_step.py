"""The step that the benchmarks of FP8 and INT8 time or compile."""

import jax
import jax.numpy as jnp

from keras_mp.fp8 import matmul
from keras_mp.fp8.scaling import get_scalings
from keras_mp.lowering.lowered import Lowered


def kept(scaling) -> tuple[int, int]:
    """The shape of the history that a scaling keeps; () where it keeps none."""
    columns = get_scalings(scaling).columns
    return (3, columns) if columns else ()


def step(recipe):
    """Forward and backward of a product, as a function of inputs, kernel, upstream gradient and history.

    Args:
        recipe: "bfloat16", or a scaling or its name.
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


def lowered(recipe, shape: tuple[int, int, int], platform: str) -> Lowered:
    """The step for a layer of so many rows, inputs and outputs: bfloat16 inputs and gradient, float32 kernel.

    Args:
        recipe: a recipe, as of `step`.
        shape: rows, inputs, outputs.
        platform: "tpu" or "cuda".
    """
    rows, inputs, outputs = shape
    sizes = [(rows, inputs), (inputs, outputs), (rows, outputs)]
    arguments = list(zip(sizes, ("bfloat16", "float32", "bfloat16"), strict=True))
    if recipe != "bfloat16" and kept(recipe):
        arguments.append((kept(recipe), "float32"))
    structs = [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in arguments]
    program = jax.jit(step(recipe)).trace(*structs).lower(lowering_platforms=(platform,))
    module = program.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    return Lowered(module.encode(), (), (), "jax", f"{recipe} {sizes}")
