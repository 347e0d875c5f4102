"""Gradients that may be sparse."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def sum_repeated_rows(gradient: Any) -> Any:
    """Gives each row of a sparse gradient once, as the sum of its occurrences; a dense one is returned as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the values of a dense or sparse gradient, as a dense tensor."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor of its variable's shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])
