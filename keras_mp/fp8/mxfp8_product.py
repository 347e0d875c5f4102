"""The matrix product of an MXFP8 layer and its gradients."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.block_scales import Blocks, dequantize_rows
from keras_mp.fp8.contraction import summed_axes
from keras_mp.fp8.first_order import first_order, first_order_operands
from keras_mp.fp8.mxfp8_scaling import MXFP8Scaling


def mxfp8_product(
    inputs: Any,
    kernel: Any,
    recipe: MXFP8Scaling,
    equations: tuple[str, str, str],
    dtype: str,
    path: str,
    apart: bool,
) -> Any:
    """Multiplies inputs by a kernel as `MXFP8Scaling` says; the gradients as well.

    Args:
        inputs: floats.
        kernel: floats.
        recipe: the scaling recipe.
        equations: of the product, of the gradient of the inputs, and of that of the kernel.
        dtype: of the result.
        path: names the products in the compiled program.
        apart: whether the compiler may not fuse what follows into the product.

    Returns:
        The product. The gradients have the dtypes of inputs and kernel.
    """
    forward, to_inputs, to_kernel = equations
    input_dtype, kernel_dtype = (keras.backend.standardize_dtype(x.dtype) for x in (inputs, kernel))

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        sizes = dict(
            zip(
                forward.split("->")[0].replace(",", ""),
                (*keras.ops.shape(inputs), *keras.ops.shape(kernel)),
                strict=True,
            )
        )

        def operand(role: str, x: Any, equation: str, place: int) -> Blocks:
            return recipe.blocks(x, role, summed_axes(equation)[place])

        def product(equation: str, left: Blocks, right: Blocks, dtype: str, role: str, apart: bool = False) -> Any:
            return _dot(equation, left, right, sizes, dtype, f"{path}/keras_mp.{role}", apart)

        def gradient(g: Any) -> Any:
            (g,) = first_order_operands([g], path)
            with scope():
                g_by_row, g_by_column = operand("gradient", g, to_inputs, 0), operand("gradient", g, to_kernel, 1)
                gradients = [
                    product(to_inputs, g_by_row, w_by_row, input_dtype, "input_gradient"),
                    product(to_kernel, x_by_column, g_by_column, kernel_dtype, "kernel_gradient"),
                ]
                return first_order(gradients, g, [], path)

        x, w = operand("input", inputs, forward, 0), operand("kernel", kernel, forward, 1)
        x_by_column, w_by_row = operand("input", inputs, to_kernel, 0), operand("kernel", kernel, to_inputs, 1)
        return product(forward, x, w, dtype, "forward", apart), gradient

    return multiply(inputs, kernel)


def _dot(equation: str, left: Blocks, right: Blocks, sizes: dict[str, Any], dtype: str, name: str, apart: bool) -> Any:
    """An einsum of two operands that were quantized along the axes that it sums over."""

    def emulate(*operands: Any) -> Any:
        # Exact in bfloat16: a value has 4 bits or fewer, and the scale is a power of two.
        x, w = (keras.ops.cast(dequantize_rows(Blocks(*pair)), "bfloat16") for pair in (operands[:2], operands[2:]))
        axes, one = ([1], [1]), keras.ops.ones(())
        return backend.scaled_dot(x, w, axes, one, dtype, precise=True, apart=apart, name=name)

    out = backend.block_scaled_dot(*left, *right, dtype, name=name, emulate=emulate)
    operands, result = equation.split("->")
    kept = [label for label in operands.replace(",", "") if label in result]
    out = keras.ops.reshape(out, [sizes[label] for label in kept])
    return out if kept == list(result) else keras.ops.transpose(out, [kept.index(label) for label in result])
