"""Gradients of products of 8-bit operands, which have no derivatives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_mp import backend
from keras_mp.fp8.scaling_recipe import Quantized


def first_order(gradients: Sequence[Any], upstream: Any, operands: Sequence[Quantized], path: str) -> list[Any]:
    """Returns the gradients of a product; to differentiate them is an error that names the layer and the way out.

    Kept for the backward pass are the 8-bit operands alone: their derivatives with respect to what was rounded are 0
    or, as JAX has them, themselves rounded to 8 bits without a scale.

    Args:
        gradients: of inputs and kernel.
        upstream: the gradient of the product.
        operands: that were kept.
        path: of the layer; "" where it has none.

    Raises:
        NotImplementedError: for second derivatives, and in forward mode.
    """
    return backend.refuse_derivatives(_message(path), gradients, [upstream, *(operand.scale for operand in operands)])


def first_order_operands(operands: Sequence[Any], path: str) -> list[Any]:
    """Returns operands of a product or of its gradients: the same error where derivatives of the gradients follow them.

    What is found here is found before JAX says that it cannot differentiate a product of blocks, and names no layer.
    """
    if backend.in_forward_mode(operands):
        raise NotImplementedError(_message(path))
    return backend.refuse_derivatives(_message(path), operands, [])


def _message(path: str) -> str:
    return (
        f"{f'the layer {path!r}' if path else 'a product'} computes in 8 bits, and has first derivatives alone, in "
        "reverse mode: for a gradient penalty, a Hessian, jvp or jacfwd call keras_mp.fp8.revert(model), or leave the "
        "layer out with keras_mp.fp8.convert(model, select=...)"
    )
