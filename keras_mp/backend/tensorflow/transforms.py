"""Functions that change how others are computed: in one kernel, again, in a loop, without memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

# Private, because TensorFlow has no public barrier.
from tensorflow.compiler.tf2xla.python import xla as tfxla

from keras_mp.backend.tensorflow.gradients import register_gradient


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the tensors, unused before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    # Without jit the operation copies, so of the others it is given one number.
    others = [tf.reshape(other, [-1])[:1] for other in others]
    return list(tfxla.optimization_barrier(*tensors, *others)[: len(tensors)])


register_gradient("XlaOptimizationBarrier", lambda op, *upstream: upstream)


def gradient_scope() -> Callable[[], Any]:
    """Makes the name scope of a custom gradient's backward pass."""
    name = tf.get_current_name_scope()
    return lambda: tf.name_scope(f"gradient_tape/{name}/")


def no_allocation() -> Any:
    """A scope that does nothing: TensorFlow's variables have values."""
    return nullcontext()


def lookups_wait() -> AbstractContextManager[None]:
    """Scope that does nothing."""
    # The gradient of a lookup is the rows that were looked up, and no zeros.
    return nullcontext()
