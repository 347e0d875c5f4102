"""Layer and RMS normalization as islands, on a CPU.

    h = (x - mean(x)) r,    r = 1 / sqrt(mean((x - mean(x))^2) + epsilon)     RMS normalization: without the means of x
    y = gamma h + beta

    g = gamma upstream
    gradient of x = r (g - mean(g) - h mean(g h))                             RMS normalization: without mean(g)
    gradient of gamma = sum(upstream h),  of beta = sum(upstream)             over the rows

All in float32. Ba, Kiros, Hinton, "Layer Normalization", 2016 (arXiv:1607.06450); Zhang, Sennrich, "Root Mean Square
Layer Normalization", 2019 (arXiv:1910.07467). Means and sums are products with ones: XLA's code for CPUs adds up rows
and columns two to three times as slowly as it multiplies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.backend.tensorflow.tensors import in_differentiated_island


def normalize_rows(
    plain: Callable[[Any], Any], x: Any, gamma: Any, beta: Any, epsilon: float, *, centered: bool, dtype: str
) -> Any:
    """Normalizes each row, by an island or the plain function.

    An island keeps x alone for the backward pass.

    Args:
        plain: a function from x to the same result.
        x: floats, shape `(..., features)`.
        gamma, beta: float32, shape `(features,)`, or None for 1 and 0.
        epsilon: the number that is added to the variance.
        centered: whether the mean of a row is subtracted, as layer normalization does and RMS normalization does not.
        dtype: the dtype of the result.

    Returns:
        A tensor of x's shape.
    """
    weights = [weight for weight in (gamma, beta) if weight is not None]
    how = _How(epsilon, centered, dtype, gamma is not None, beta is not None)
    y = in_differentiated_island(_forward, _backward, [x, *weights], how=how)
    return plain(x) if y is None else y


class _How(NamedTuple):
    """The settings of a call."""

    epsilon: float
    centered: bool
    dtype: str
    scales: bool  # by gamma
    shifts: bool  # by beta


def _forward(x: tf.Tensor, *weights: tf.Tensor, how: _How) -> tf.Tensor:
    normalized, _ = _normalized(x, how)
    if how.scales:
        normalized *= weights[0]
    if how.shifts:
        normalized += weights[-1]
    return tf.cast(normalized, how.dtype)


def _backward(upstream: tf.Tensor, x: tf.Tensor, *weights: tf.Tensor, how: _How) -> list[tf.Tensor]:
    upstream = tf.cast(upstream, tf.float32)
    normalized, inverse = _normalized(x, how)
    g = upstream * weights[0] if how.scales else upstream
    to_x = g - normalized * _mean_of_rows(g * normalized)
    if how.centered:
        to_x -= _mean_of_rows(g)
    gradients = [tf.cast(inverse * to_x, x.dtype)]
    if how.scales:
        gradients.append(_sum_over_rows(upstream * normalized))
    if how.shifts:
        gradients.append(_sum_over_rows(upstream))
    return gradients


def _normalized(x: tf.Tensor, how: _How) -> tuple[tf.Tensor, tf.Tensor]:
    """x normalized, and 1 / its standard deviation."""
    x = tf.cast(x, tf.float32)
    if how.centered:
        x -= _mean_of_rows(x)
    inverse = tf.math.rsqrt(_mean_of_rows(x * x) + how.epsilon)
    return x * inverse, inverse


def _mean_of_rows(x: tf.Tensor) -> tf.Tensor:
    features = x.shape[-1]
    sums = tf.linalg.matvec(tf.reshape(x, (-1, features)), tf.ones(features))
    return tf.reshape(sums, (*tf.unstack(tf.shape(x)[:-1]), 1)) / features


def _sum_over_rows(x: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(x, (-1, x.shape[-1]))
    # Of a single row of ones XLA makes a sum again.
    return tf.matmul(tf.ones((2, tf.shape(rows)[0])), rows)[0]
