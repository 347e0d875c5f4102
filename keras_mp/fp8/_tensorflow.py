"""TensorFlow: the functions of `keras_mp.fp8`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Private: the way to hand StableHLO to TensorFlow.
from tensorflow.compiler.tf2xla.python import xla as tfxla

from keras_mp.backend.tensorflow.devices import traced_chip
from keras_mp.backend.tensorflow.tensors import barrier

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
    """Multiplies two tensors, and scales the sums, as of `_jax`.

    Sizes may be unknown. TensorFlow's own products refuse FP8 and return 16-bit floats rounded, so these are written in
    StableHLO, which XLA compiles in eager and graph mode, too.
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
    sums_dtype = tf.int32 if left.dtype == tf.int8 else tf.float32
    left_type, right_type = (_mlir_type(operand.shape, operand.dtype) for operand in (left, right))
    sums_type = _mlir_type(shape, sums_dtype)
    precision = "HIGHEST" if precise else "DEFAULT"
    dimensions = f"contracting_dims = {axes[0]} x {axes[1]}, precision = [{precision}, {precision}]"
    location = f"{tf.get_current_name_scope()}/{name}".replace("\\", "\\\\").replace('"', '\\"')
    # Shape polymorphism: what is unknown here is filled in when the program is compiled.
    module = f"""module @product attributes {{jax.uses_shape_polymorphism = true}} {{
      func.func public @main(%left: {left_type}, %right: {right_type}) -> {sums_type} {{
        %sums = stablehlo.dot_general %left, %right, {dimensions}
          : ({left_type}, {right_type}) -> {sums_type} loc("{location}")
        return %sums : {sums_type}
      }}
    }}"""
    (sums,) = tfxla.call_module(
        [left, right],
        version=9,
        module=module.encode(),
        Tout=[sums_dtype],
        Sout=[tf.TensorShape(shape)],
        platforms=["CPU"],
        disabled_checks=[tfxla.call_module_disable_check_platform()],  # nothing in it is a CPU's alone
    )
    result = tf.cast(tf.cast(sums, tf.float32) * factor, dtype)
    return barrier([result], [])[0] if apart else result


def block_scaled_dot(operands: Sequence[Any], factor: Any, dtype: str, name: str, emulate: Callable[..., Any]) -> Any:
    """Emulates the product: TensorFlow lacks it and its types."""
    del dtype, name
    return emulate(factor, *operands)


def _mlir_type(shape: Sequence[int | None], dtype: tf.DType) -> str:
    sizes = ["?" if size is None else str(size) for size in shape]
    return f"tensor<{'x'.join([*sizes, _MLIR_TYPES[dtype.name]])}>"


def row_major(x: Any, platforms: Sequence[str] = ("tpu",)) -> Any:
    """Returns the same tensor: TensorFlow cannot say how it lies."""
    del platforms
    return x


def refuse_derivatives(message: str, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the same tensors; to differentiate them is an error."""

    @tf.custom_gradient
    def same(*tensors: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            raise NotImplementedError(message)

        return [tf.identity(x) for x in tensors[: len(values)]], gradient

    return same(*values, *others)
