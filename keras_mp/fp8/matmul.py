"""The matrix product of an FP8 layer and its gradients: three FP8 products."""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.int8_products import Int8Scaling, MatrixProducts, int8_product
from keras_mp.fp8.mxfp8 import MXFP8Scaling, mxfp8_product
from keras_mp.fp8.quantized_dot import (
    explicit,
    first_order,
    first_order_operands,
    join,
    quantized_dot,
    sum_gradients,
    summed_axes,
    whole_shape,
)
from keras_mp.fp8.scaling import get_recipe
from keras_mp.fp8.scaling_recipe import ROLES, Quantized, Recipe, scaling
from keras_mp.stability.accumulate import last_axis


def matmul(
    inputs: Any,
    kernel: Any,
    recipe: Recipe | str | None = None,
    *,
    equation: str = "",
    dtype: str = "",
    path: str = "",
    history: Any = None,
    part: Any = None,
) -> Any:
    """Multiplies inputs by a kernel in FP8; so are both gradients.

        x8, sx = quantize(x, "input")       w8, sw = quantize(w, "kernel")
        y      = (x8 . w8) / (sx sw)

        g8, sg = quantize(gradient of y, "gradient")
        gradient of x = (g8 . w8^T) / (sg sw)
        gradient of w = (x8^T . g8) / (sx sg)

    Each `.` has FP8 operands and float32 sums, and is divided by the two scales once, in float32, before it is rounded
    to the result's dtype; a bias comes after that. Only x8, w8 and the scales are kept for the backward pass. The
    forward product lets a GPU add up with the fewer bits of its fast accumulation, the gradients do not, as
    Transformer Engine's default recipe has it.

    With a scale a row, sx and sw are those of the rows and columns of the result, and the two gradients have copies of
    x, w and g that are scaled for them: see `RowwiseScaling`.

    The products of the largest inputs, kernel and gradient magnitudes may be as small as 1e-32; where the divisor
    overflows float32, the result is zero.

    With `Int8Scaling` the operands are INT8, with `MXFP8Scaling` in blocks: their docstrings have the equations.

    On hardware without FP8 the compiler widens the operands: the sums are of the same products.

    Args:
        inputs: floats of shape (..., features), or as the equation says; any batch size, unknown or zero as well.
        kernel: floats of shape (features, units), or as the equation says. Given in float32, it is rounded once.
        recipe: a scaling `Recipe`, or the name of one; "current" by default.
        equation: of an einsum, such as "abc,cde->abde": each label stands in two of its three terms.
        dtype: of the result; by default that of the inputs.
        path: names the products in the compiled program: `path/keras_mp.forward`, `path/keras_mp.input_gradient`,
            `path/keras_mp.kernel_gradient`. On JAX the name scopes around the call take its place.
        history: amaxes of the steps before, float32 of shape (3, recipe.history_length), by role and step, the newest
            step first, for a scaling recipe that needs them, and then a column with the number of steps, for one that
            counts them (`recipe.counts_steps`); without it each call is a first step. Its gradient is no
            gradient, but the history of the next step.
        part: how the whole kernel is made of what the devices have, from `keras_mp.fp8.quantized_dot.read_kernel`; None
            where `kernel` is whole. Its gradient is then this device's part of the sum over all.

    Returns:
        A tensor of shape (..., units), or as the equation says. The gradients have the dtypes of inputs and kernel.

    Raises:
        TypeError: inputs or kernel are no floats.
        ValueError: unknown scaling recipe, the equation is no matrix product, or a history of another shape.
    """
    recipe = get_recipe(recipe)
    inputs, kernel = backend.as_tensor(inputs), backend.as_tensor(kernel)
    input_dtype, kernel_dtype = float_dtype("inputs", inputs), float_dtype("kernel", kernel)
    rank = len(inputs.shape)
    equation = explicit(equation, rank) if equation else last_axis(rank)
    operands, result_labels = equation.split("->")
    input_labels, kernel_labels = operands.split(",")

    to_inputs = f"{result_labels},{kernel_labels}->{input_labels}"
    to_kernel = f"{input_labels},{result_labels}->{kernel_labels}"
    histories = [] if history is None else [_checked(history, recipe)]
    # libtpu 0.0.42 runs out of stack where it fuses a product that splits features into heads with attention's own.
    splits = len(kernel_labels) - len(set(kernel_labels) & set(input_labels)) > 1
    equations, result_dtype = (equation, to_inputs, to_kernel), dtype or input_dtype
    if isinstance(recipe, Int8Scaling):
        dtypes, whole = (result_dtype, input_dtype, kernel_dtype), whole_shape(kernel, part)
        products = MatrixProducts(equations, inputs.shape, whole, dtypes, recipe, path, apart=splits)
        return int8_product(inputs, kernel, histories, recipe, products, path, part)
    if isinstance(recipe, MXFP8Scaling):
        return mxfp8_product(inputs, kernel, recipe, equations, result_dtype, path, apart=splits)

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any, *histories: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        history = histories[0] if histories else None
        quantize = functools.partial(_quantize, recipe, history)
        x8, x8_for_kernel = quantize("input", inputs, (equation, 0), (to_kernel, 0))
        w8, w8_for_inputs = quantize("kernel", kernel, (equation, 1), (to_inputs, 1), part=part)
        amaxes = [recipe.amax(x, history) for x in (inputs, kernel)] if histories else []

        def gradient(g: Any) -> Any:
            product = functools.partial(quantized_dot, path=path, precise=True, apart=False)
            (g,) = first_order_operands([g], path)
            with scope():
                g8_for_inputs, g8_for_kernel = quantize("gradient", g, (to_inputs, 0), (to_kernel, 1))
                following = [recipe.next_history(history, [*amaxes, recipe.amax(g, history)])] if histories else []
                own = product(to_kernel, x8_for_kernel, g8_for_kernel, kernel_dtype, "kernel_gradient")
                to_x = product(to_inputs, g8_for_inputs, w8_for_inputs, input_dtype, "input_gradient")
                kept = [x8_for_kernel, w8_for_inputs]
                return *first_order([to_x, sum_gradients(own, part)], g, kept, path), *following

        result = quantized_dot(equation, x8, w8, result_dtype, "forward", path=path, precise=False, apart=splits)
        return result, gradient

    return multiply(inputs, kernel, *histories)


def _quantize(
    recipe: Recipe, history: Any, role: str, x: Any, *products: tuple[str, int], part: Any = None
) -> list[Quantized]:
    """Quantizes an operand for each of its products, given as the equation and the operand's place in it."""
    known = None if history is None else history[ROLES.index(role)]
    with scaling(part):
        if not recipe.per_row:
            return [join(recipe.quantize(x, role, history=known), part)] * len(products)
        along = [summed_axes(equation)[place] for equation, place in products]
        return [join(recipe.quantize(x, role, axes), part, axes) for axes in along]


def _checked(history: Any, recipe: Recipe) -> Any:
    wanted = (len(ROLES), recipe.history_length + recipe.counts_steps)
    if not wanted[1] or tuple(history.shape) != wanted:
        raise ValueError(
            f"history has the shape {tuple(history.shape)}, and {recipe} "
            + (f"needs {wanted}" if wanted[1] else "keeps none: leave it out")
        )
    return backend.as_tensor(history)


def float_dtype(name: str, x: Any) -> str:
    """The dtype of a tensor of floats; a TypeError names another."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if not keras.backend.is_float_dtype(dtype):
        raise TypeError(f"{name} must be floats, got {dtype}: cast them, as with keras.ops.cast(x, 'bfloat16')")
    return dtype
