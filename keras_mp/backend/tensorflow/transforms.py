"""Functions that change how others are computed: in one kernel, again, in a loop, without memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

# Private, because TensorFlow has no public barrier.
from tensorflow.compiler.tf2xla.python import xla as tfxla

from keras_mp.backend.tensorflow.gradients import register_gradient


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the same tensors, with which the compiler may begin nothing before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    # Without jit the operation copies, so of the others it is given one number.
    others = [tf.reshape(other, [-1])[:1] for other in others]
    return list(tfxla.optimization_barrier(*tensors, *others)[: len(tensors)])


register_gradient("XlaOptimizationBarrier", lambda op, *upstream: upstream)


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any] | None:
    """Normalizes each feature over a batch in one kernel, which takes mean and variance in float32.

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


def gradient_scope() -> Callable[[], Any]:
    """Remembers where a custom gradient's forward pass is; the result makes the name scope of its backward pass."""
    name = tf.get_current_name_scope()
    return lambda: tf.name_scope(f"gradient_tape/{name}/")


def no_allocation() -> Any:
    """A scope that does nothing: TensorFlow's variables have values."""
    return nullcontext()


def lookups_wait() -> AbstractContextManager[None]:
    """A scope that does nothing: the gradient of a lookup is the rows that were looked up, and no zeros."""
    return nullcontext()
