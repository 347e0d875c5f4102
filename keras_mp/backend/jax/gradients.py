"""Gradients, which may be sparse."""

from collections.abc import Callable
from typing import Any

import jax


def linear_gradient(function: Callable[[Any], Any], argument: Any, upstream: Any, *, name: str) -> Any:
    """Computes the gradient of a linear function.

    Args:
        function: of one tensor.
        argument: a tensor, of which only shape and dtype are used.
        upstream: the gradient of the function's result.
        name: of the operations in the compiled program, the last of the scopes, which `/` separates.

    Returns:
        A tensor of the argument's shape.
    """
    with jax.named_scope(name.rpartition("/")[2]):
        return jax.linear_transpose(function, argument)(upstream)[0]


def sum_repeated_rows(gradient: Any) -> Any:
    """Returns the gradient: on JAX, Keras's gradients are dense."""
    return gradient


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values of a gradient."""
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the gradient: it is dense."""
    return gradient


def dense(gradient: Any) -> Any:
    """Returns the gradient: it is dense."""
    return gradient
