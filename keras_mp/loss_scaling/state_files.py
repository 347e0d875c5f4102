"""Optimizer states of 8 bits in Keras's files. HDF5 has no such floats: h5py writes and reads them as opaque bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np


def with_dtypes(store: Mapping[str, Any], variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """Gives the arrays of a file the dtypes that they were written with.

    Args:
        store: arrays by the number of their variable.
        variables: the variables.

    Returns:
        The arrays, by the same numbers.
    """
    numbers = list(store.keys())  # Keras's store is no mapping that can be iterated over
    dtypes = {str(number): str(variable.dtype) for number, variable in enumerate(variables)}
    return {number: _with_dtype(np.asarray(store[number]), dtypes.get(number)) for number in numbers}


def load_with_dtypes(optimizer: keras.optimizers.Optimizer) -> None:
    """Has an optimizer of Keras's load its variables so, too: Keras loads an inner optimizer as well as its wrapper."""
    # Past Keras's tracking of attributes.
    object.__setattr__(optimizer, "load_own_variables", partial(_load, optimizer))


def _load(optimizer: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> None:
    type(optimizer).load_own_variables(optimizer, with_dtypes(store, optimizer.variables))


def _with_dtype(array: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype is None or array.dtype.kind != "V" or array.dtype.name == dtype:
        return array
    import ml_dtypes  # comes with TensorFlow and with JAX

    return array.view(getattr(ml_dtypes, dtype))
