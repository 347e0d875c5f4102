"""Matrix products of FP8 operands."""

from typing import Any

import jax
import jax.numpy as jnp


def fp8_dot(
    left: Any,
    right: Any,
    axes: tuple[list[int], list[int]],
    factor: Any,
    dtype: str,
    *,
    precise: bool,
    apart: bool,
    name: str,
) -> Any:
    """Multiplies two FP8 arrays, adds up in float32, and scales the sums.

    Args:
        left: FP8, of any shape.
        right: FP8, of any shape; one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: of the operation in the compiled program: the last of the scopes, which `/` separates. Keras has entered
            the others already, in the backward pass as well.

    Returns:
        An array: left's other axes, then right's.
    """
    precision = jax.lax.Precision.HIGHEST if precise else jax.lax.Precision.DEFAULT
    with jax.named_scope(name.rpartition("/")[2]):
        sums = jax.lax.dot_general(
            left, right, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
    result = (sums * factor).astype(dtype)
    return jax.lax.optimization_barrier(result) if apart else result
