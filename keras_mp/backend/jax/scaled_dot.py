"""Matrix products of FP8 and INT8 operands, whose sums are scaled."""

from typing import Any

import jax
import jax.numpy as jnp


def scaled_dot(
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
    """Multiplies two arrays, adds up in float32, or INT8 in int32, and scales the sums in float32.

    Args:
        left: FP8, int8 or 16-bit floats, of any shape.
        right: likewise, of any shape; of FP8, one of the two in E4M3.
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
    sums_dtype = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    with jax.named_scope(name.rpartition("/")[2]):
        sums = jax.lax.dot_general(
            left, right, (axes, ((), ())), precision=precision, preferred_element_type=sums_dtype
        )
    result = (sums.astype(jnp.float32) * factor).astype(dtype)
    return jax.lax.optimization_barrier(result) if apart else result
