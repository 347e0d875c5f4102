"""Convolutions of INT8 operands, whose sums are scaled."""

from typing import Any

import jax
import jax.numpy as jnp


def scaled_convolution(
    inputs: Any,
    kernel: Any,
    factor: Any,
    dtype: str,
    *,
    strides: tuple[int, ...],
    padding: list[tuple[int, int]],
    input_dilations: tuple[int, ...],
    kernel_dilations: tuple[int, ...],
    turned: bool,
    name: str,
) -> Any:
    """Convolves two INT8 arrays, adds up in int32, and scales the sums in float32.

    Args:
        inputs: int8 of shape (batch, *lengths, channels).
        kernel: int8 of shape (*sizes, channels of the inputs, channels of the result); the last two the other way
            round, where it is turned.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        strides: by spatial axis.
        padding: zeros before and after, by spatial axis.
        input_dilations: one more than the zeros between elements of the inputs, by spatial axis.
        kernel_dilations: likewise of the kernel.
        turned: whether the kernel is read from its last place to its first, as the gradient of an input needs it.
        name: of the operation in the compiled program: the last of the scopes, which `/` separates.

    Returns:
        An array of shape (batch, *lengths, channels).
    """
    axes = tuple(range(len(strides)))
    places = "".join("DHW"[-len(strides) :])
    if turned:
        kernel = jnp.flip(kernel, axes)
    with jax.named_scope(name.rpartition("/")[2]):
        sums = jax.lax.conv_general_dilated(
            inputs,
            kernel,
            strides,
            padding,
            lhs_dilation=input_dilations,
            rhs_dilation=kernel_dilations,
            dimension_numbers=(f"N{places}C", f"{places}OI" if turned else f"{places}IO", f"N{places}C"),
            preferred_element_type=jnp.int32,
        )
    return (sums.astype(jnp.float32) * factor).astype(dtype)
