"""Islands: jitted programs, and other faster forms, inside a step that is not jitted as a whole: where they may be.

On a CPU TensorFlow's kernels multiply 16-bit matrices faster than XLA's code does, so that the step is not jitted. What
lies between the products reads and writes memory once a kernel there, and once in all where XLA compiles it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any

import tensorflow as tf

# Private: no public name tells whether a tape records.
from tensorflow.python.eager.record import could_possibly_record

from keras_mp.backend.tensorflow.devices import traced_chip

_lock = Lock()
_scopes_without = 0
_condition: ContextVar[Any] = ContextVar("condition", default=None)


@contextmanager
def without_islands() -> Iterator[None]:
    """Scope in which what is traced has no islands.

    It holds in every thread: each replica is traced in one of its own. What was traced before stays as it is, and so
    does what keeps only its input for the backward pass, as `keras_mp.layers.Gelu` does.
    """
    _count_scopes(1)
    try:
        yield
    finally:
        _count_scopes(-1)


def _count_scopes(more: int) -> None:
    global _scopes_without
    with _lock:
        _scopes_without += more


def has_islands() -> bool:
    """Tells whether what is traced now may have islands.

    Such is a graph for one CPU that is not jitted as a whole.
    """
    return not _scopes_without and tf.inside_function() and _runs_kernels_of_cpus()


def is_differentiated_island() -> bool:
    """Tells whether it may have islands, and a tape records."""
    return could_possibly_record() and has_islands()


def is_differentiated_by_kernels_of_cpus() -> bool:
    """Tells whether a tape records kernels of a CPU."""
    return could_possibly_record() and _runs_kernels_of_cpus()


def _runs_kernels_of_cpus() -> bool:
    return tf.__internal__.get_enclosing_xla_context() is None and traced_chip().platform == "cpu"


def in_differentiated_island(
    forward: Callable[..., Any], backward: Callable[..., list[Any]], tensors: list[Any], how: Hashable
) -> Any | None:
    """Calls a function as an island, forward and backward.

    The latter gets the tensors and nothing else. All calls with the same functions, shapes and settings share the two
    programs, so a new batch size compiles two; in the step of a prepared model not more than `step.MOST` of them.

    Args:
        forward: `forward(*tensors, how=how)`, a float tensor. It reads no variable.
        backward: `backward(upstream, *tensors, how=how)`, the gradient of each tensor.
        tensors: floats.
        how: settings of both functions.

    Returns:
        The result; None where there is no island. That is also in inference, which an export keeps as plain operations,
        and where a size but for the first is unknown: each length would compile anew.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not (is_differentiated_island() and all(map(has_known_sizes, tensors))):
        return None

    @tf.custom_gradient
    def apply(*tensors: Any) -> Any:
        y = call_program(forward, *tensors, how=how)
        return y, lambda upstream: call_program(backward, upstream, *tensors, how=how)

    return apply(*tensors)


def has_known_sizes(tensor: tf.Tensor) -> bool:
    """Tells whether all sizes but the first are known."""
    # Else each new one would compile anew.
    return tensor.shape.rank is not None and None not in tensor.shape[1:]


@contextmanager
def programs_if(condition: tf.Tensor) -> Iterator[None]:
    """Scope in which programs run where a condition is true."""
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def call_program(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Calls a function as a jitted, shared program.

    Args:
        function: a function that reads no variable. It is not differentiated: the caller has a gradient of its own.
        *arguments, **settings: the arguments of the function; tensors are among the former alone.
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
