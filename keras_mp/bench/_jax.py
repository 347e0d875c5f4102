"""Training steps on JAX to be timed, as in `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import keras


def timed_steps(model: keras.Model, batch: tuple) -> Callable[[int], float]:
    """Prepares a compiled model, as on TensorFlow.

    The state of the training is kept beside the model from here on, as `fit` does between epochs: the model's own
    arrays are gone after the first step.
    """
    data = jax.device_put(batch)
    x, y, *weight = data
    model._symbolic_build(data_batch=data)
    model.make_train_function()
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in variables] for variables in lists)

    def run(steps: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(steps):
            _, state = model.train_function(state, iter([(x, y, weight[0] if weight else None)]))
        jax.block_until_ready(state)
        return time.perf_counter() - started

    return run
