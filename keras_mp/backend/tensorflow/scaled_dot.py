"""Matrix products of FP8 and INT8 operands, whose sums are scaled."""

from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.devices import is_for_cpu
from keras_mp.backend.tensorflow.scaled_sums import scaled_sums


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
        right: likewise, of any shape; of FP8, one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: of the operation in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor: left's other axes, then right's.
    """
    if left.dtype in (tf.bfloat16, tf.float16) and is_for_cpu():
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

    return scaled_sums(left, right, factor, dtype, shape, dot, apart=apart, name=name)
