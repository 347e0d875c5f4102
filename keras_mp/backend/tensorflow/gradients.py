"""Functions with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

# Private: no public name tells whether forward mode follows a tensor.
from tensorflow.python.eager import forwardprop_util

from keras_mp.backend.tensorflow.tensors import as_tensor, dense


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function with a gradient of its own.

    Args:
        function: a function from tensors to `(results, gradient)`: floats, in any structure, and `gradient(*upstream)`,
            which takes a tensor for each of them and returns one for each argument, or None for 0. What it computes is
            differentiated as usual.
    """
    own = tf.custom_gradient(function)
    return lambda *arguments: own(*map(as_tensor, arguments))


def in_forward_mode(tensors: Sequence[Any]) -> bool:
    """Whether forward mode follows one of the tensors.

    In a graph it then follows each operation that computes a result, and not the function's own gradient.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def gradients_of(function: Callable[..., Any], arguments: Sequence[Any], upstream: Any) -> list[Any]:
    """Computes the gradients of `sum(upstream result)`, one an argument."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(arguments))
        result = function(*arguments)
    return list(map(dense, tape.gradient(result, list(arguments), upstream, tf.UnconnectedGradients.ZERO)))


def register_gradient(operation: str, gradient: Callable[..., Any]) -> None:
    """Gives one of TensorFlow's operations a gradient.

    It is for second derivatives and forward mode. Where this version of TensorFlow, or another library, has one, that
    stays.
    """
    with suppress(KeyError):
        tf.RegisterGradient(operation)(gradient)


# That of `barrier`.
register_gradient("XlaOptimizationBarrier", lambda op, *upstream: upstream)
