"""The matrix product of an FP8 layer and its gradients: three FP8 products."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.contraction import explicit, last_axis
from keras_mp.fp8.scaling import Quantized, Recipe, get_recipe


def matmul(
    inputs: Any, kernel: Any, recipe: Recipe | str | None = None, *, equation: str = "", dtype: str = "", path: str = ""
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

    The products of the largest inputs, kernel and gradient magnitudes may be as small as 1e-32; where the divisor
    overflows float32, the result is zero.

    On hardware without FP8 the compiler widens the operands: the sums are of the same products.

    Args:
        inputs: floats of shape (..., features), or as the equation says; any batch size, unknown or zero as well.
        kernel: floats of shape (features, units), or as the equation says. Given in float32, it is rounded once.
        recipe: a `Recipe`, or "current", which is the default.
        equation: of an einsum, such as "abc,cde->abde": each label stands in two of its three terms.
        dtype: of the result; by default that of the inputs.
        path: names the products in the compiled program: `path/keras_mp.forward`, `path/keras_mp.input_gradient`,
            `path/keras_mp.kernel_gradient`. On JAX the name scopes around the call take its place.

    Returns:
        A tensor of shape (..., units), or as the equation says. The gradients have the dtypes of inputs and kernel.

    Raises:
        TypeError: inputs or kernel are no floats.
        ValueError: unknown recipe, or the equation is no matrix product.
    """
    recipe = get_recipe(recipe)
    inputs, kernel = backend.as_tensor(inputs), backend.as_tensor(kernel)
    input_dtype, kernel_dtype = _float_dtype("inputs", inputs), _float_dtype("kernel", kernel)
    rank = len(inputs.shape)
    equation = explicit(equation, rank) if equation else last_axis(rank)
    operands, result_labels = equation.split("->")
    input_labels, kernel_labels = operands.split(",")

    # libtpu 0.0.42 runs out of stack where it fuses a product that splits features into heads with attention's own.
    splits = len(kernel_labels) - len(set(kernel_labels) & set(input_labels)) > 1

    def product(labels: str, left: Quantized, right: Quantized, role: str, dtype: str) -> Any:
        return _dot(
            labels, left, right, dtype, f"{path}/keras_mp.{role}", role != "forward", role == "forward" and splits
        )

    @keras.ops.custom_gradient
    def multiply(inputs: Any, kernel: Any) -> Any:
        x8, w8 = recipe.quantize(inputs, "input"), recipe.quantize(kernel, "kernel")

        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            g8 = recipe.quantize(arguments[0] if upstream is None else upstream, "gradient")
            to_inputs = f"{result_labels},{kernel_labels}->{input_labels}"
            to_kernel = f"{input_labels},{result_labels}->{kernel_labels}"
            return (
                product(to_inputs, g8, w8, "input_gradient", input_dtype),
                product(to_kernel, x8, g8, "kernel_gradient", kernel_dtype),
            )

        return product(equation, x8, w8, "forward", dtype or input_dtype), gradient

    return multiply(inputs, kernel)


def _float_dtype(name: str, x: Any) -> str:
    dtype = keras.backend.standardize_dtype(x.dtype)
    if not keras.backend.is_float_dtype(dtype):
        raise TypeError(f"{name} must be floats, got {dtype}: cast them, as with keras.ops.cast(x, 'bfloat16')")
    return dtype


def _dot(equation: str, left: Quantized, right: Quantized, dtype: str, name: str, precise: bool, apart: bool) -> Any:
    """An einsum of two quantized tensors whose summed labels stand in both, divided by their scales."""
    operands, result = equation.split("->")
    left_labels, right_labels = operands.split(",")
    summed = [label for label in left_labels if label in right_labels]
    axes = [left_labels.index(label) for label in summed], [right_labels.index(label) for label in summed]
    factor = 1.0 / (left.scale * right.scale)
    out = backend.fp8_dot(left.values, right.values, axes, factor, dtype, precise=precise, apart=apart, name=name)
    labels = [label for label in left_labels + right_labels if label not in summed]
    return out if labels == list(result) else keras.ops.transpose(out, [labels.index(label) for label in result])
