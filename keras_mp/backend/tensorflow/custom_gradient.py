"""Functions with a gradient of their own, which have second derivatives and forward mode as well."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Private: no public name tells whether forward mode follows a tensor.
from tensorflow.python.eager import forwardprop_util

from keras_mp.backend.tensorflow.tensors import as_tensor


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of tensors that has a gradient of its own.

    Args:
        function: from tensors to `(results, gradient)`: floats, in any structure, and `gradient(*upstream)`, which
            takes a tensor for each of them and returns one for each argument, or None for 0. What it computes is
            differentiated as usual.

    Returns:
        A function of the same tensors that returns the results.
    """
    own = tf.custom_gradient(function)
    return lambda *arguments: own(*map(as_tensor, arguments))


def in_forward_mode(tensors: Sequence[Any]) -> bool:
    """Whether forward mode follows one of the tensors.

    In a graph it then follows each operation that computes a result, and not the function's own gradient.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def in_gradient() -> bool:
    """Returns False: TensorFlow calls a gradient in the backward pass alone."""
    return False


def with_derivatives_of(formula: Callable[..., Any], values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Returns tensors that have the derivatives of a formula for them.

    Args:
        formula: from the arguments to a sequence of the same tensors; called where they are differentiated.
        values: tensors.
        arguments: floats.
    """

    @tf.custom_gradient
    def same(*arguments: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                results = formula(*arguments)
            return tape.gradient(results, arguments, upstream, tf.UnconnectedGradients.ZERO)

        return [tf.identity(value) for value in values], gradient

    return same(*arguments)


def refuse_derivatives(message: str, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the same tensors; to differentiate them is an error.

    Args:
        message: of the `NotImplementedError`.
        values: tensors.
        others: what the values are made of, of which one may change where TensorFlow cannot see that a value does.
    """

    @tf.custom_gradient
    def same(*tensors: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            raise NotImplementedError(message)

        return [tf.identity(x) for x in tensors[: len(values)]], gradient

    return same(*values, *others)
