"""The matrix product of an INT8 layer and its gradients."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.contraction import summed_axes
from keras_mp.fp8.int8_scaling import TOP, Int8Scaling, magnitude
from keras_mp.fp8.of_parts import join, sum_gradients, whole_shape
from keras_mp.fp8.quantized_dot import quantized_dot
from keras_mp.fp8.roles import ROLES
from keras_mp.fp8.scaling_recipe import Quantized
from keras_mp.fp8.whole_amax import scaling

MOST_TERMS = (2**31 - 1) // TOP**2
"""So many products of two integers are sure to have a sum within INT32."""


def int8_product(
    inputs: Any,
    kernel: Any,
    histories: list[Any],
    recipe: Int8Scaling,
    equations: tuple[str, str, str],
    dtype: str,
    path: str,
    part: Any,
    apart: bool,
) -> Any:
    """Multiplies inputs by a kernel as `Int8Scaling` says; the gradients as well.

    Args:
        inputs: floats.
        kernel: floats.
        histories: one history, or none.
        recipe: the scaling recipe.
        equations: of the product, of the gradient of the inputs, and of that of the kernel.
        dtype: of the result.
        path: names the products in the compiled program.
        part: how the whole kernel is made of what the devices have; None where `kernel` is whole.
        apart: whether the compiler may not fuse what follows into the product.

    Returns:
        The product. The gradients have the dtypes of inputs and kernel, and that of the history is the next history.
    """
    forward, to_inputs, to_kernel = equations
    input_dtype, kernel_dtype = (keras.backend.standardize_dtype(x.dtype) for x in (inputs, kernel))
    integer = _integer_products(inputs.shape, whole_shape(kernel, part), equations, recipe)
    # Gradients of two layers of one shape are rounded independently.
    variable = zlib.crc32(path.encode())

    @keras.ops.custom_gradient
    def multiply(inputs: Any, kernel: Any, *histories: Any) -> Any:
        scope = backend.gradient_scope()
        history = histories[0] if histories else None
        made: dict[tuple[str, str], Quantized] = {}
        amaxes = [magnitude(x) for x in (inputs, kernel)] if histories and not recipe.per_row else []

        def operand(role: str, x: Any, equation: str, place: int) -> Quantized:
            own = part if role == "kernel" else None
            axes = summed_axes(equation)[place] if recipe.per_row else None
            if equation not in integer:
                return join(Quantized(keras.ops.cast(x, input_dtype), keras.ops.ones(())), own)
            key = role, equation if recipe.per_row else ""
            if key not in made:
                known = None if history is None else history[ROLES.index(role)]
                with scaling(own):
                    made[key] = join(recipe.quantize(x, role, axes, known, variable), own, axes)
            return made[key]

        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            g = arguments[0] if upstream is None else upstream
            dot = functools.partial(quantized_dot, path=path, precise=False, apart=False)
            with scope():
                following = []
                if histories:
                    following = [recipe.next_history(history, [*amaxes, magnitude(g)] if amaxes else [])]
                g_for_inputs, g_for_kernel = operand("gradient", g, to_inputs, 0), operand("gradient", g, to_kernel, 1)
                by_kernel, x_for_kernel = to_kernel, x_by_column
                if to_kernel in integer:
                    by_kernel, x_for_kernel = _summed_last(to_kernel, _nan_past_int32(to_kernel, x_by_column))
                own = dot(by_kernel, x_for_kernel, g_for_kernel, kernel_dtype, "kernel_gradient")
                return (
                    dot(to_inputs, g_for_inputs, w_by_row, input_dtype, "input_gradient"),
                    sum_gradients(own, part),
                    *following,
                )

        x, w = operand("input", inputs, forward, 0), operand("kernel", kernel, forward, 1)
        x_by_column, w_by_row = operand("input", inputs, to_kernel, 0), operand("kernel", kernel, to_inputs, 1)
        return quantized_dot(forward, x, w, dtype, "forward", path=path, precise=False, apart=apart), gradient

    return multiply(inputs, kernel, *histories)


def _integer_products(
    inputs: tuple[Any, ...], kernel: tuple[Any, ...], equations: tuple[str, str, str], recipe: Int8Scaling
) -> set[str]:
    """Those of the three products whose operands are INT8, by the shapes of inputs and kernel."""
    terms = equations[0].split("->")[0].split(",")
    sizes = dict(zip("".join(terms), (*inputs, *kernel), strict=True))
    wanted = equations if recipe.kernel_gradient == "int8" else equations[:2]
    return {equation for equation in wanted if _fits(equation, sizes)}


def _fits(equation: str, sizes: dict[str, Any]) -> bool:
    """Whether a product sums over few enough terms, or over a number that is not known yet."""
    left, right = equation.split("->")[0].split(",")
    summed = [sizes[label] for label in left if label in right]
    return not all(isinstance(size, int) for size in summed) or math.prod(summed) <= MOST_TERMS


def _summed_last(equation: str, left: Quantized) -> tuple[str, Quantized]:
    """The same product with the axes that it sums over last in its left operand, and in memory.

    A TPU v5e multiplies integers that it adds up along the rows of both operands no faster than bfloat16.
    """
    labels, rest = equation.split(",", 1)
    summed = summed_axes(equation)[0]
    order = [axis for axis in range(len(labels)) if axis not in summed] + list(summed)
    if order == list(range(len(labels))):
        return equation, left
    scale = left.scale if len(left.scale.shape) == 0 else keras.ops.transpose(left.scale, order)
    values = backend.row_major(keras.ops.transpose(backend.row_major(left.values), order))
    return f"{''.join(labels[axis] for axis in order)},{rest}", Quantized(values, scale)


def _nan_past_int32(equation: str, left: Quantized) -> Quantized:
    """Gives an operand the scale NaN where a product of it sums over too many terms, once their number is known."""
    axes = summed_axes(equation)[0]
    if all(isinstance(left.values.shape[axis], int) for axis in axes):
        return left
    sizes = [keras.ops.cast(keras.ops.shape(left.values)[axis], "float32") for axis in axes]
    return Quantized(left.values, keras.ops.where(math.prod(sizes) <= MOST_TERMS, left.scale, float("nan")))
