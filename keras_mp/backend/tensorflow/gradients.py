"""Gradients, which may be sparse."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf


def linear_gradient(function: Callable[[Any], Any], argument: Any, upstream: Any, *, name: str) -> Any:
    """Computes the gradient of a linear function.

    Args:
        function: of one tensor.
        argument: a tensor, of which only shape and dtype are used.
        upstream: the gradient of the function's result.
        name: of the operations in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor of the argument's shape.
    """
    with tf.name_scope(name):
        with tf.GradientTape() as tape:
            tape.watch(argument)
            result = function(argument)
        return tape.gradient(result, argument, upstream)


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


def register_gradient(operation: str, gradient: Callable[..., Any]) -> None:
    """Gives one of TensorFlow's operations a gradient, for second derivatives and forward mode.

    Args:
        operation: its name, such as "XlaDotV2".
        gradient: from the operation and the gradients of its results to those of its inputs. It is left as it is where
            this version of TensorFlow, or another library, has one.
    """
    with suppress(KeyError):
        tf.RegisterGradient(operation)(gradient)
