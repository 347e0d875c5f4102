"""An optimizer's update as one program, on a CPU whose step is not jitted as a whole.

Keras makes an update of some ten kernels a weight, each of which reads and writes memory; one program reads gradient,
weight and slots once, and writes them once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from keras_mp import backend


def in_one_program(
    optimizer: keras.optimizers.Optimizer, update: Callable[[list[Any]], None], grads: list[Any]
) -> None:
    """Calls an update with gradients, as one program where the step that is traced may have some.

    Args:
        optimizer: whose update it is.
        update: takes the gradients, and assigns to variables.
        grads: a tensor for each variable, which may be sparse; on several replicas summed.
    """
    backend.update_in_one_program(update, grads, _keeps_rows(optimizer), optimizer._iterations)


class UpdateInOneProgram:
    """Takes the place of an optimizer's own `_backend_apply_gradients`, which it calls.

    Args:
        optimizer: a Keras optimizer that is not inside another.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, grads: list[Any], trainable_variables: list[keras.Variable]) -> None:
        own = partial(type(self.optimizer)._backend_apply_gradients, self.optimizer)
        if backend.replica_count() > 1:
            own(grads, trainable_variables)  # which sums them over the replicas
        else:
            in_one_program(self.optimizer, lambda grads: own(grads, trainable_variables), grads)


def _keeps_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an update from a sparse gradient changes the rows in it only; of a class that is not Keras's, it may."""
    step = type(optimizer).update_step
    if not step.__module__.startswith("keras."):
        return True
    return step is keras.optimizers.SGD.update_step and not optimizer.momentum
