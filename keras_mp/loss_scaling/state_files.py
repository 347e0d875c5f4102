"""Optimizer states of 8 bits in Keras's files. HDF5 has no such floats: h5py writes and reads them as opaque bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

_SIZES = {"bfloat16": 2, "float8_e4m3fn": 1}


def with_dtypes(store: Mapping[str, Any], variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """Gives the arrays of a file the dtypes that they were written with.

    Args:
        store: arrays by the number of their variable.
        variables: the variables.

    Returns:
        The arrays, by the same numbers.

    Raises:
        ValueError: If the file was written with another state_dtype: its numbers would be read as others, such as
            Adam's second moment as its square root.
    """
    numbers = list(store.keys())  # Keras's store is no mapping that can be iterated over
    by_number = {str(number): variable for number, variable in enumerate(variables)}
    return {number: _with_dtype(np.asarray(store[number]), by_number.get(number)) for number in numbers}


def load_with_dtypes(optimizer: keras.optimizers.Optimizer) -> None:
    """Has an optimizer of Keras's load its variables so, too: Keras loads an inner optimizer as well as its wrapper."""
    # Past Keras's tracking of attributes.
    object.__setattr__(optimizer, "load_own_variables", partial(_load, optimizer))


def _load(optimizer: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> None:
    type(optimizer).load_own_variables(optimizer, with_dtypes(store, optimizer.variables))


def _with_dtype(array: np.ndarray, variable: keras.Variable | None) -> np.ndarray:
    if variable is None:
        return array
    dtype = keras.backend.standardize_dtype(variable.dtype)
    size = _SIZES.get(dtype)
    if (array.dtype.itemsize if array.dtype.kind == "V" else None) != size:
        held = {1: "8 bits", 2: "bfloat16"}.get(array.dtype.itemsize, array.dtype.name)
        raise ValueError(
            f"the file holds optimizer variable {variable.path!r} in {held}, and this optimizer stores it in {dtype}: "
            "load the file with the state_dtype that it was saved with. A TrainingCheckpoint goes on in any state_dtype"
        )
    if size is None or array.dtype.name == dtype:
        return array
    import ml_dtypes  # comes with TensorFlow and with JAX

    return array.view(getattr(ml_dtypes, dtype))
