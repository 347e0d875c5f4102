"""Training steps on TensorFlow to be timed, as in `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def timed_steps(model: keras.Model, batch: tuple) -> Callable[[int], float]:
    """Prepares a compiled model to train on one batch.

    Args:
        model: a compiled model; its weights will change.
        batch: `(x, y)` or `(x, y, sample_weight)` of numpy arrays.

    Returns:
        A function that makes a number of steps, waits for them, and returns the seconds that they took.
    """
    tensors = keras.tree.map_structure(tf.convert_to_tensor, batch)
    dataset = tf.data.Dataset.from_tensors(tensors).repeat()
    options = tf.data.Options()
    # Its search for the best settings takes the processor from the steps.
    options.autotune.enabled = False
    batches = iter(dataset.with_options(options))
    model._symbolic_build(data_batch=tensors)
    model.make_train_function()

    def run(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            logs = model.train_function(batches)
        # A tensor that is not computed yet is waited for when it is read.
        for value in keras.tree.flatten(logs):
            np.asarray(value)
        return time.perf_counter() - started

    return run
