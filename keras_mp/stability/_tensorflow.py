"""Products with float32 sums, and normalization, on TensorFlow."""

import string
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Private, because the public tf.matmul takes an output dtype for integers alone.
from tensorflow.compiler.tf2xla.python import xla as tfxla
from tensorflow.compiler.xla import xla_data_pb2

from keras_mp.backend.tensorflow.devices import traced_chip
from keras_mp.backend.tensorflow.gradients import register_gradient
from keras_mp.stability._tensorflow_rows import normalize_rows as normalize_rows


def fused_attention_in_float32(dtype: str) -> bool:
    """Returns False: its scores are in their own dtype."""
    return False


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts 16-bit tensors into float32; see `keras_mp.stability.accumulate`."""
    operands, out = equation.split("->")
    left_labels, right_labels = operands.split(",")
    batch = [label for label in left_labels if label in right_labels and label in out]
    summed = [label for label in left_labels if label in right_labels and label not in out]
    left_free = [label for label in left_labels if label not in right_labels]
    right_free = [label for label in right_labels if label not in left_labels]
    in_program = tf.__internal__.get_enclosing_xla_context() is not None
    # XLA's compiler for CPUs has no bfloat16 kernel for every layout, but has one for rows times columns.
    left_order, right_order = [*batch, *left_free, *summed], [*batch, *summed, *right_free]
    if not in_program and list(right_labels) == [*batch, *right_free, *summed]:
        # By itself the product reads columns that stand as rows faster than a transpose would write them.
        right_order = list(right_labels)
    left, right = _transposed(left, left_labels, left_order), _transposed(right, right_labels, right_order)
    if in_program and traced_chip().platform == "cpu":
        # In a step with second derivatives it would merge other transposes with the product.
        left, right = tfxla.optimization_barrier(left, right)
    first = range(len(batch))
    dimensions = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=first,
        rhs_batch_dimensions=first,
        lhs_contracting_dimensions=map(left_order.index, summed),
        rhs_contracting_dimensions=map(right_order.index, summed),
    )
    result = tfxla.dot_general(left, right, dimensions, preferred_element_type=tf.float32)
    return _transposed(result, [*batch, *left_free, *right_free], out)


def _gradient_of_dot(op: tf.Operation, upstream: Any) -> tuple[Any, Any]:
    """The gradients of `XlaDotV2`, by products that have gradients."""
    left, right = op.inputs
    numbers = xla_data_pb2.DotDimensionNumbers.FromString(op.get_attr("dimension_numbers"))
    labels = iter(string.ascii_letters)
    left_labels = [next(labels) for _ in left.shape]
    right_labels = [next(labels) for _ in right.shape]
    for kind in ("batch_dimensions", "contracting_dimensions"):
        for of_left, of_right in zip(getattr(numbers, f"lhs_{kind}"), getattr(numbers, f"rhs_{kind}"), strict=True):
            right_labels[of_right] = left_labels[of_left]
    batch = [left_labels[axis] for axis in numbers.lhs_batch_dimensions]
    free = [label for label in (*left_labels, *right_labels) if (label in left_labels) != (label in right_labels)]
    out, left_term, right_term = ("".join(term) for term in (batch + free, left_labels, right_labels))
    low = tf.cast(upstream, left.dtype)
    product = einsum_float32 if left.dtype.size == 2 else tf.einsum
    to_left = product(f"{out},{right_term}->{left_term}", low, right)
    to_right = product(f"{left_term},{out}->{right_term}", left, low)
    return tf.cast(to_left, left.dtype), tf.cast(to_right, right.dtype)


register_gradient("XlaDotV2", _gradient_of_dot)


def _transposed(x: Any, labels: Sequence[str], order: Sequence[str]) -> Any:
    return x if list(labels) == list(order) else tf.transpose(x, [labels.index(label) for label in order])


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any] | None:
    """Normalizes each feature over a batch in one kernel.

    It takes mean and variance in float32.

    Args:
        x: floats, shape `(..., features)`.
        gamma, beta: float32, shape `(features,)`, or None for 1 and 0.
        epsilon: the number that is added to the variance.

    Returns:
        (gamma * (x - mean) / sqrt(variance + epsilon) + beta in x's dtype, mean, variance), the variance that of the
        batch itself; or None where XLA fuses the same, and where TensorFlow has no such kernel.
    """
    features = x.shape[-1]
    if tf.__internal__.get_enclosing_xla_context() is not None or not features or x.dtype not in _NORMALIZED:
        return None
    count = tf.size(x) // features
    # Where it can be, the first axis stays what it is: cuDNN has limits for it.
    batch = tf.shape(x)[0] if len(x.shape) > 2 else count
    rows = x if len(x.shape) == 4 else tf.reshape(x, (batch, count // tf.maximum(batch, 1), 1, features))
    scale = tf.ones(features) if gamma is None else tf.cast(tf.convert_to_tensor(gamma), tf.float32)
    offset = tf.zeros(features) if beta is None else tf.cast(tf.convert_to_tensor(beta), tf.float32)
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=rows, scale=scale, offset=offset, mean=tf.zeros(0), variance=tf.zeros(0), epsilon=epsilon, is_training=True
    )
    # The kernel divides by one value less than there are, as moving averages of other frameworks want it. Of a single
    # value that is NaN on a GPU.
    number = tf.cast(count, tf.float32)
    variance = tf.where(tf.equal(count, 1), tf.zeros_like(variance), variance * ((number - 1) / number))
    return (y if rows is x else tf.reshape(y, tf.shape(x))), mean, variance


_NORMALIZED = (tf.float32, tf.bfloat16, tf.float16)
