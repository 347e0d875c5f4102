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
