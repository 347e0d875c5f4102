"""Jitted programs within a graph, or the same operations as kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import tensorflow as tf

_condition: ContextVar[Any] = ContextVar("condition", default=None)


@contextmanager
def programs_if(condition: tf.Tensor) -> Iterator[None]:
    """Within it, programs run where a boolean tensor of shape () is true; elsewhere their operations run as kernels."""
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def call_program(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Calls a function of tensors as a jitted program, which all calls with the same shapes and settings share.

    Args:
        function: reads no variable. It is not differentiated: the caller has a gradient of its own.
        *arguments, **settings: its arguments; tensors are among the former alone.
    """
    condition = _condition.get()
    if condition is None:
        return _jitted(function)(*arguments, **settings)
    return _jitted_if(function)(condition, *arguments, **settings)


@cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False)


@cache
def _jitted_if(function: Callable[..., Any]) -> Callable[..., Any]:
    program = _jitted(function)

    def choose(condition: tf.Tensor, *arguments: Any, **settings: Any) -> Any:
        return tf.cond(condition, lambda: program(*arguments, **settings), lambda: function(*arguments, **settings))

    return tf.function(choose, autograph=False)
