"""The three matrix products of an INT8 layer."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.contraction import summed_axes
from keras_mp.fp8.int8_product import TO_KERNEL
from keras_mp.fp8.int8_scaling import MOST_TERMS, Int8Scaling
from keras_mp.fp8.quantized_dot import quantized_dot
from keras_mp.fp8.scaling_recipe import Quantized


class MatrixProducts:
    """Matrix products of inputs and a kernel.

    Args:
        equations: of the product, of the gradient of the inputs, and of that of the kernel.
        inputs: their shape.
        kernel: the shape of the whole.
        dtypes: of the result, and of the two gradients.
        recipe: the scaling recipe.
        path: names the products in the compiled program.
        apart: whether the compiler may not fuse what follows into the product.
    """

    def __init__(
        self,
        equations: tuple[str, str, str],
        inputs: tuple[Any, ...],
        kernel: tuple[Any, ...],
        dtypes: tuple[str, str, str],
        recipe: Int8Scaling,
        path: str,
        apart: bool,
    ):
        self._equations, self._dtypes, self._path, self._apart = equations, dtypes, path, apart
        terms = equations[0].split("->")[0].split(",")
        sizes = dict(zip("".join(terms), (*inputs, *kernel), strict=True))
        wanted = range(3 if recipe.kernel_gradient == "int8" else 2)
        self.integer = {product for product in wanted if _fits(equations[product], sizes)}

    def summed_axes(self, product: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over."""
        return summed_axes(self._equations[product])

    def forward(self, x: Quantized, w: Quantized) -> Any:
        """The result."""
        equation, dtype = self._equations[0], self._dtypes[0]
        return quantized_dot(equation, x, w, dtype, "forward", path=self._path, precise=False, apart=self._apart)

    def to_inputs(self, g: Quantized, w: Quantized) -> Any:
        """The gradient of the inputs."""
        return self._gradient(self._equations[1], g, w, self._dtypes[1], "input_gradient")

    def to_kernel(self, x: Quantized, g: Quantized) -> Any:
        """The gradient of the kernel."""
        equation = self._equations[2]
        if TO_KERNEL in self.integer:
            equation, x = _summed_last(equation, _nan_past_int32(equation, x))
        return self._gradient(equation, x, g, self._dtypes[2], "kernel_gradient")

    def _gradient(self, equation: str, left: Quantized, right: Quantized, dtype: str, role: str) -> Any:
        return quantized_dot(equation, left, right, dtype, role, path=self._path, precise=False, apart=False)


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
