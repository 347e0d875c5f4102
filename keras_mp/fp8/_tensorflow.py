"""Products of 8-bit floats, and of blocks that share a scale, on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Private: the way to hand StableHLO to TensorFlow.
from tensorflow.compiler.tf2xla.python import xla as tfxla

from keras_mp.backend.tensorflow.devices import traced_chip

_MLIR_TYPES = {
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "int32": "i32",
}


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
    """Multiplies two tensors, adds up in float32, or INT8 in int32, and scales the sums in float32.

    Args:
        left: FP8, int8 or floats, of any shape; sizes may be unknown.
        right: an array like left, of any shape; of FP8, one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: the dtype of the result.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: the name of the operation in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor: left's other axes, then right's.
    """
    if left.dtype in (tf.bfloat16, tf.float16) and traced_chip().platform == "cpu":
        # XLA for CPUs has no such product with float32 sums ("Unsupported element type for DotThunk", TensorFlow 2.21).
        left, right = tf.cast(left, tf.float32), tf.cast(right, tf.float32)
    shape = [
        size
        for operand, summed in zip((left, right), axes, strict=True)
        for axis, size in enumerate(operand.shape)
        if axis not in summed
    ]
    precision = "HIGHEST" if precise else "DEFAULT"

    def dot(types: str) -> str:
        dimensions = f"contracting_dims = {axes[0]} x {axes[1]}, precision = [{precision}, {precision}]"
        return f"%sums = stablehlo.dot_general %left, %right, {dimensions} : {types}"

    return _scaled_sums(left, right, factor, dtype, shape, dot, apart=apart, name=name)


def block_scaled_dot(
    left: Any,
    left_scales: Any,
    right: Any,
    right_scales: Any,
    factor: Any,
    dtype: str,
    *,
    name: str,
    emulate: Callable[..., Any],
) -> Any:
    """Multiplies the rows of two matrices in blocks that share a scale.

    TensorFlow has neither the product nor the type of the scales: they are emulated.

    Args:
        left: FP8 or E2M1, of shape (m, k).
        left_scales: the scales of left, of shape (m, k / 32) for FP8, uint8, as E8M0; (m, k / 16) for E2M1, of E4M3.
        right: a matrix of the dtypes of left, of shape (n, k).
        right_scales: the scales of right, likewise, of n rows.
        factor: float32, of shape (), that the sums are multiplied by; None for 1.
        dtype: the dtype of the result.
        name: the name of the operation in the compiled program, as of `scaled_dot`.
        emulate: a function that computes the same from the four and the factor.

    Returns:
        A tensor of shape (m, n).
    """
    del dtype, name
    return emulate(factor, left, left_scales, right, right_scales)


def _scaled_sums(
    left: Any,
    right: Any,
    factor: Any,
    dtype: str,
    shape: Sequence[int | None],
    operation: Callable[[str], str],
    *,
    apart: bool,
    name: str,
) -> Any:
    """Adds up in float32, or INT8 in int32, and scales the sums in float32.

    TensorFlow's own products refuse FP8 and return 16-bit floats rounded, and its convolutions refuse INT8, so these
    are written in StableHLO, which XLA compiles in eager and graph mode, too.

    Args:
        left: FP8, int8 or floats, of any shape; sizes may be unknown.
        right: a tensor like left.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: the dtype of the result.
        shape: the shape of the result.
        operation: a function that writes the StableHLO that makes `%sums` of `%left` and `%right`, given its type.
        apart: whether the compiler may not fuse what follows into the product.
        name: the name of the operation in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor of that shape.
    """
    left_type, right_type = (_mlir_type(operand.shape, operand.dtype.name) for operand in (left, right))
    sums_dtype = "int32" if left.dtype == tf.int8 else "float32"
    sums_type, wide_type, result_type = (_mlir_type(shape, element) for element in (sums_dtype, "float32", dtype))
    location = f"{tf.get_current_name_scope()}/{name}".replace("\\", "\\\\").replace('"', '\\"')
    last = "apart" if apart else "result"
    # Shape polymorphism: what is unknown here is filled in when the program is compiled.
    module = f"""module @scaled_sums attributes {{jax.uses_shape_polymorphism = true}} {{
      func.func public @main(%left: {left_type}, %right: {right_type}, %factor: tensor<f32>) -> {result_type} {{
        {operation(f'({left_type}, {right_type}) -> {sums_type} loc("{location}")')}
        %wide = stablehlo.convert %sums : ({sums_type}) -> {wide_type}
        {_broadcast_factor(shape)}
        %scaled = stablehlo.multiply %wide, %factors : {wide_type}
        %result = stablehlo.convert %scaled : ({wide_type}) -> {result_type}
        {f"%apart = stablehlo.optimization_barrier %result : {result_type}" if apart else ""}
        return %{last} : {result_type}
      }}
    }}"""
    return tfxla.call_module(
        [left, right, factor],
        version=9,
        module=module.encode(),
        Tout=[tf.as_dtype(dtype)],
        Sout=[tf.TensorShape(shape)],
        platforms=["CPU"],
        disabled_checks=[tfxla.call_module_disable_check_platform()],  # nothing in it is a CPU's alone
    )[0]


def _broadcast_factor(shape: Sequence[int | None]) -> str:
    """StableHLO for %factors: %factor in the shape of %wide."""
    sums_type = _mlir_type(shape, "float32")
    if None not in shape:
        return f"%factors = stablehlo.broadcast_in_dim %factor, dims = [] : (tensor<f32>) -> {sums_type}"
    lines = []
    for axis in range(len(shape)):
        lines.append(
            f"%size{axis} = stablehlo.get_dimension_size %wide, dim = {axis} : ({sums_type}) -> tensor<i32>\n"
            f"%length{axis} = stablehlo.reshape %size{axis} : (tensor<i32>) -> tensor<1xi32>"
        )
    sizes = ", ".join(f"%length{axis}" for axis in range(len(shape)))
    types = ", ".join(["tensor<1xi32>"] * len(shape))
    lines.append(
        f"%shape = stablehlo.concatenate {sizes}, dim = 0 : ({types}) -> tensor<{len(shape)}xi32>\n"
        f"%factors = stablehlo.dynamic_broadcast_in_dim %factor, %shape, dims = [] : "
        f"(tensor<f32>, tensor<{len(shape)}xi32>) -> {sums_type}"
    )
    return "\n".join(lines)


def _mlir_type(shape: Sequence[int | None], dtype: str) -> str:
    sizes = ["?" if size is None else str(size) for size in shape]
    return f"tensor<{'x'.join([*sizes, _MLIR_TYPES[dtype]])}>"


def row_major(x: Any, platforms: Sequence[str] = ("tpu",)) -> Any:
    """Returns the same tensor: JAX alone can say how an array lies in memory."""
    del platforms
    return x


def refuse_derivatives(message: str, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the same tensors; to differentiate them is an error.

    Args:
        message: the message of the `NotImplementedError`.
        values: tensors.
        others: the things that the values are made of, of which one may change where TensorFlow cannot see that a value
            does.
    """

    @tf.custom_gradient
    def same(*tensors: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            raise NotImplementedError(message)

        return [tf.identity(x) for x in tensors[: len(values)]], gradient

    return same(*values, *others)
