"""Matrix products of FP8 and INT8 operands, whose sums or blocks have scales."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_BATCH = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
_CONFIG = json.dumps({"scaled_dot_backend_config": {**_BATCH, "dequantize_type": "BF16"}})


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


def block_scaled_dot(
    left: Any,
    left_exponents: Any,
    right: Any,
    right_exponents: Any,
    dtype: str,
    *,
    name: str,
    emulate: Callable[..., Any],
) -> Any:
    """Multiplies the rows of two matrices in an MX format, by the units of NVIDIA's GPUs.

    Args:
        left: FP8 of shape (m, k).
        left_exponents: uint8 of shape (m, k / 32), the scales as E8M0.
        right: FP8 of shape (n, k); of the two one in E4M3.
        right_exponents: uint8 of shape (n, k / 32).
        dtype: of the result.
        name: of the operation in the compiled program, as of `scaled_dot`.
        emulate: computes the same from the four, for other devices.

    Returns:
        An array of shape (m, n).
    """

    def by_units(*operands: Any) -> Any:
        left, left_scales, right, right_scales = (operand[None] for operand in operands)
        left_scales, right_scales = (
            jax.lax.bitcast_convert_type(scales, "float8_e8m0fnu") for scales in (left_scales, right_scales)
        )
        within_a_device = bool(jax.sharding.get_abstract_mesh().manual_axes)
        multiply: Callable[..., Any] = _within_a_device if within_a_device else jax.nn.scaled_matmul
        with jax.named_scope(name.rpartition("/")[2]):
            return multiply(left, right, left_scales, right_scales, preferred_element_type=dtype)[0]

    operands = left, left_exponents, right, right_exponents
    if 0 in (*left.shape, *right.shape):
        return emulate(*operands)
    return jax.lax.platform_dependent(*operands, cuda=by_units, default=emulate)


def _within_a_device(left: Any, right: Any, left_scales: Any, right_scales: Any, preferred_element_type: str) -> Any:
    """As `jax.nn.scaled_matmul`, which would ask for the devices to divide the product over."""
    multiply = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((left.shape[0], left.shape[1], right.shape[1]), preferred_element_type),
        custom_call_api_version=2,
        legacy_backend_config=_CONFIG,
    )
    return multiply(left, right, left_scales, right_scales)
