"""The product of an INT8 layer and its gradients."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import keras

from keras_mp import backend
from keras_mp.fp8.first_order import first_order, first_order_operands
from keras_mp.fp8.int8_scaling import Int8Scaling, magnitude
from keras_mp.fp8.of_parts import join, sum_gradients
from keras_mp.fp8.roles import ROLES
from keras_mp.fp8.scaling_recipe import Quantized
from keras_mp.fp8.whole_amax import scaling

FORWARD, TO_INPUTS, TO_KERNEL = range(3)


class Products(Protocol):
    """A layer's product and the two that are its gradients, of inputs x, kernel w and gradient g.

    Attributes:
        integer: those of the three whose operands are INT8.
    """

    integer: set[int]

    def summed_axes(self, product: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over: those of its left and those of its right operand."""

    def forward(self, x: Quantized, w: Quantized) -> Any:
        """The result."""

    def to_inputs(self, g: Quantized, w: Quantized) -> Any:
        """The gradient of the inputs."""

    def to_kernel(self, x: Quantized, g: Quantized) -> Any:
        """The gradient of the kernel."""


def int8_product(
    inputs: Any, kernel: Any, histories: list[Any], recipe: Int8Scaling, products: Products, path: str, part: Any
) -> Any:
    """Multiplies inputs by a kernel as `Int8Scaling` says; the gradients as well.

    Args:
        inputs: floats.
        kernel: floats.
        histories: one history, or none.
        recipe: the scaling recipe.
        products: how the two are multiplied.
        path: of the layer: gradients of two layers of one shape are rounded independently.
        part: how the whole kernel is made of what the devices have; None where `kernel` is whole.

    Returns:
        The product. The gradient of the history is the next history.
    """
    compute_dtype = keras.backend.standardize_dtype(inputs.dtype)
    variable = zlib.crc32(path.encode())

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any, *histories: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        history = histories[0] if histories else None
        made: dict[tuple[str, int], Quantized] = {}
        amaxes = [magnitude(x) for x in (inputs, kernel)] if histories and not recipe.per_row else []

        def operand(role: str, x: Any, product: int, place: int) -> Quantized:
            own = part if role == "kernel" else None
            axes = products.summed_axes(product)[place] if recipe.per_row else None
            if product not in products.integer:
                return join(Quantized(keras.ops.cast(x, compute_dtype), keras.ops.ones(())), own)
            key = role, product if recipe.per_row else -1
            if key not in made:
                known = None if history is None else history[ROLES.index(role)]
                with scaling(own):
                    made[key] = join(recipe.quantize(x, role, axes, known, variable), own, axes)
            return made[key]

        def gradient(g: Any) -> Any:
            (g,) = first_order_operands([g], path)
            with scope():
                following = []
                if histories:
                    following = [recipe.next_history(history, [*amaxes, magnitude(g)] if amaxes else [])]
                g_for_inputs, g_for_kernel = operand("gradient", g, TO_INPUTS, 0), operand("gradient", g, TO_KERNEL, 1)
                own = products.to_kernel(x_for_kernel, g_for_kernel)
                gradients = [products.to_inputs(g_for_inputs, w_for_inputs), sum_gradients(own, part)]
                return *first_order(gradients, g, [x_for_kernel, w_for_inputs], path), *following

        x, w = operand("input", inputs, FORWARD, 0), operand("kernel", kernel, FORWARD, 1)
        x_for_kernel, w_for_inputs = operand("input", inputs, TO_KERNEL, 0), operand("kernel", kernel, TO_INPUTS, 1)
        return products.forward(x, w), gradient

    return multiply(inputs, kernel, *histories)
