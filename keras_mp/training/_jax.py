"""Steps over several processes on JAX, which Keras's own `fit` makes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_mp.parallel._jax_workers import shards_input as shards_input


def steps_of(model: keras.Model) -> Any:
    """Returns None: Keras's own `fit` trains over several processes."""


def replica_values(variable: keras.Variable) -> None:
    """Returns None: JAX's arrays are whole, wherever they lie."""


def assign_replica_values(variable: keras.Variable, values: np.ndarray) -> None:
    """Gives a variable the sum of TensorFlow's replicas."""
    variable.assign(values.sum(axis=0))
