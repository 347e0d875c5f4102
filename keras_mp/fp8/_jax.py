"""JAX: the functions of `keras_mp.fp8`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from keras_mp.backend.jax.gradients import varying_as

_BATCH = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # XLA's names


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
    """Multiplies two arrays, and scales the sums in float32.

    FP8 and 16-bit floats are added up in float32, int8 in int32.

    Args:
        left, right: arrays of any shape, of one kind; of FP8, one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: the name of the operation in the compiled program: the last of the scopes, which `/` separates. Keras has
            entered the others already, in the backward pass as well.

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


def block_scaled_dot(operands: Sequence[Any], factor: Any, dtype: str, name: str, emulate: Callable[..., Any]) -> Any:
    """Multiplies rows of two matrices in blocks with scales.

    NVIDIA's GPUs have units for it.

    Args:
        operands: a matrix of shape (m, k), FP8 or E2M1, and its scales: (m, k / 32) for FP8, uint8, as E8M0;
            (m, k / 16) for E2M1, of E4M3; and the same of (n, k). Of FP8, one of the two is in E4M3.
        factor: float32, of shape (), that the sums are multiplied by; None for 1.
        emulate: a function that computes the same from the factor and the operands, for other devices.
    """

    def by_units(factor: Any, *operands: Any) -> Any:
        left, left_scales, right, right_scales = (operand[None] for operand in operands)
        if left_scales.dtype == jnp.uint8:
            left_scales, right_scales = (
                jax.lax.bitcast_convert_type(scales, "float8_e8m0fnu") for scales in (left_scales, right_scales)
            )
        within_a_device = bool(jax.sharding.get_abstract_mesh().manual_axes)
        multiply: Callable[..., Any] = _within_a_device if within_a_device else jax.nn.scaled_matmul
        sums_dtype = dtype if factor is None else "float32"
        with jax.named_scope(name.rpartition("/")[2]):
            sums = multiply(left, right, left_scales, right_scales, preferred_element_type=sums_dtype)[0]
        sums = varying_as(sums, [left, left_scales, right, right_scales])  # XLA's operation does not say so
        return sums if factor is None else (sums * factor).astype(dtype)

    if any(x.size == 0 for x in operands):
        return emulate(factor, *operands)
    return jax.lax.platform_dependent(factor, *operands, cuda=by_units, default=emulate)


def _within_a_device(left: Any, right: Any, left_scales: Any, right_scales: Any, preferred_element_type: str) -> Any:
    """As `jax.nn.scaled_matmul`, but not divided over devices."""
    multiply = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((left.shape[0], left.shape[1], right.shape[1]), preferred_element_type),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(
            {"scaled_dot_backend_config": {**_BATCH, "dequantize_type": _TYPES[preferred_element_type]}}
        ),
    )
    return multiply(left, right, left_scales, right_scales)


def row_major(x: Any, platforms: Sequence[str] = ("tpu",)) -> Any:
    """Returns the same array, stored row by row.

    A transposed array is then really moved, and a product of it takes the path of one that was not transposed. Other
    platforms than those named store it as they like.
    """
    from jax.experimental.layout import Layout, with_layout_constraint  # `import jax` does not import it

    rows = Layout(major_to_minor=tuple(range(len(x.shape))))
    constrained = dict.fromkeys(platforms, lambda x: with_layout_constraint(x, rows))
    return jax.lax.platform_dependent(x, **constrained, default=lambda x: x)


def refuse_derivatives(message: str, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the same arrays; to differentiate them is an error.

    Args:
        others: the things that the values are made of, of which one may change where JAX cannot see that a value does.
    """

    @jax.custom_jvp
    def same(values: list[Any], others: list[Any]) -> list[Any]:
        return values

    @partial(same.defjvp, symbolic_zeros=True)
    def refuse(primals: Any, tangents: Any) -> Any:
        if any(not isinstance(tangent, SymbolicZero) for tangent in jax.tree.leaves(tangents)):
            raise NotImplementedError(message)
        return primals[0], tangents[0]

    return same(list(values), list(others))
