"""What all 8-bit products share: equations, the product itself, kernels in parts, and no second derivatives."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.scaling_recipe import Quantized, Recipe, lies_in

# Einsum equations of an input and a kernel, and which of them are matrix products.


def problem(equation: str) -> str:
    """Says why an equation is no matrix product of an input and a kernel.

    Args:
        equation: as for `keras.layers.EinsumDense`, such as "abc,cd->abd" or "...x,xy->...y".

    Returns:
        A phrase, or "" where it is one: each label stands in exactly two of the three terms.
    """
    operands, arrow, result = equation.replace(" ", "").replace("...", "").partition("->")
    terms = [*operands.split(","), result]
    if not arrow or len(terms) != 3:
        return f"the equation {equation!r} is not of the form 'input,kernel->result'"
    if "..." in equation.partition(",")[2].partition("->")[0]:
        return f"the equation {equation!r} has an ellipsis in the kernel"
    for label in sorted(set("".join(terms))):
        count = [term.count(label) for term in terms]
        if max(count) > 1:
            return f"the equation {equation!r} has the label {label!r} twice in one term"
        if sum(count) != 2:
            return f"the equation {equation!r} has the label {label!r} in {sum(count)} of its 3 terms; 2 make a product"
    return ""


def explicit(equation: str, rank: int) -> str:
    """Writes the ellipsis of an equation out.

    Args:
        equation: as for `problem`.
        rank: number of axes of the input.

    Returns:
        The same product without an ellipsis and blanks.

    Raises:
        ValueError: it is no matrix product, or not of an input of that rank.
    """
    wrong = problem(equation)
    if wrong:
        raise ValueError(f"FP8 computes matrix products of an input and a kernel, but {wrong}")
    equation = equation.replace(" ", "")
    named = equation.partition(",")[0].replace("...", "")
    missing = rank - len(named)
    if missing < 0 or (missing and "..." not in equation):
        raise ValueError(f"equation={equation!r} takes inputs of {len(named)} axes, got {rank}")
    fresh = [label for label in string.ascii_letters if label not in equation]
    return equation.replace("...", "".join(fresh[:missing]))


def summed_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that a product sums over: those of its left and those of its right operand, in pairs.

    Args:
        equation: of a matrix product, without an ellipsis.
    """
    left, right = equation.split("->")[0].split(",")
    summed = [label for label in left if label in right]
    return tuple(left.index(label) for label in summed), tuple(right.index(label) for label in summed)


# One product of two quantized tensors, divided by their scales.


def quantized_dot(
    equation: str, left: Quantized, right: Quantized, dtype: str, role: str, *, path: str, precise: bool, apart: bool
) -> Any:
    """An einsum of two quantized tensors whose summed labels stand in both, divided by their scales.

    Args:
        equation: of a matrix product, without an ellipsis.
        left: with a scale of shape (), or one for each row.
        right: likewise.
        dtype: of the result.
        role: "forward", "input_gradient" or "kernel_gradient", which names the product in the compiled program.
        path: of the layer, for that name.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.

    Returns:
        A tensor as the equation says.
    """
    name = f"{path}/keras_mp.{role}"
    operands, result = equation.split("->")
    left_labels, right_labels = operands.split(",")
    axes = summed_axes(equation)
    kept = [
        [label for axis, label in enumerate(labels) if axis not in summed]
        for labels, summed in zip((left_labels, right_labels), axes, strict=True)
    ]

    def multiply(factor: Any, dtype: str) -> Any:
        lists = list(axes[0]), list(axes[1])
        return backend.scaled_dot(
            left.values, right.values, lists, factor, dtype, precise=precise, apart=apart, name=name
        )

    if len(left.scale.shape) == 0:
        out = multiply(1.0 / (left.scale * right.scale), dtype)
    else:
        rows = keras.ops.squeeze(1.0 / left.scale, axes[0])
        columns = keras.ops.squeeze(1.0 / right.scale, axes[1])
        out = multiply(keras.ops.ones(()), "float32")
        out = out * keras.ops.expand_dims(rows, [len(kept[0]) + i for i in range(len(kept[1]))])
        out = keras.ops.cast(out * columns, dtype)
    labels = kept[0] + kept[1]
    return out if labels == list(result) else keras.ops.transpose(out, [labels.index(label) for label in result])


# Kernels of which each device has a part: a part is scaled as the whole would be, and what is gathered are its codes.
#
# A part comes from `backend.part_of`. Where a kernel is whole it is None, and nothing here does anything.


def read_kernel(variable: Any, recipe: Recipe) -> tuple[Any, Any]:
    """The value of a kernel and None, or this device's part of it and how the whole is made.

    Args:
        variable: the kernel.
        recipe: one that cannot scale a part gets the whole, gathered as that of any layer.
    """
    return backend.part_of(variable) if recipe.takes_parts else (backend.as_tensor(variable), None)


def join(quantized: Quantized, part: Any, axes: tuple[int, ...] | None = None) -> Quantized:
    """Gathers a tensor of which a part was quantized.

    Args:
        quantized: the part's codes and scale.
        part: how the whole is made; None where it is the whole.
        axes: along which there is one scale; None for all.
    """
    if part is None:
        return quantized
    scale = quantized.scale
    if len(scale.shape) and not lies_in(part, axes):
        scale = part.joined(scale)
    return Quantized(part.joined(quantized.values), scale)


def sum_gradients(gradient: Any, part: Any) -> Any:
    """The gradient of a kernel, or this device's part of the sum over the devices."""
    return gradient if part is None else part.of_sum(gradient)


def whole_shape(kernel: Any, part: Any) -> tuple[Any, ...]:
    """The shape of a kernel of which this may be a part."""
    return tuple(keras.ops.shape(kernel)) if part is None else part.shape


# Gradients of products of 8-bit operands, which have no derivatives of their own.


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
