"""A large array of a weights file that is read in the parts that a process needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from keras.src.saving import saving_lib

_READ_WHOLE_BELOW = 2**20
"""Bytes of an array that are read at once."""


class SavedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in an open file; as an array of NumPy, whose attributes it has, it is read whole.

    Args:
        dataset: of h5py, with one axis or more.
        dtype: of the values, where the file holds their bits alone, as for bfloat16.
    """

    def __init__(self, dataset: Any, dtype: np.dtype) -> None:
        self._dataset = dataset
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(dataset.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self._dataset[index]
        return part.view(self.dtype) if part.dtype.kind == "V" else part  # bits, as those of bfloat16

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...].astype(dtype or self.dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(value) if isinstance(value, SavedArray) else value for value in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # NumPy and JAX ask for protocols that this is not to have
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def _dataset(store: Any, key: str) -> Any:
    """The dataset that Keras's store reads, after its own check, which refuses links to other files."""
    if hasattr(saving_lib, "safe_get_h5_dataset"):
        return saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
    dataset = store._h5_entry_group[key]
    return store._verify_dataset(dataset) if hasattr(store, "_verify_dataset") else dataset  # 3.13.0 checks nothing


def unread(read: Callable[..., Any]) -> Callable[..., Any]:
    """Has Keras's store of weights hand out large arrays of floats unread; makes the replacement of a patch."""

    def get(store: Any, key: str) -> Any:
        # The file of an array that several files hold parts of the layer of is closed before it is assigned.
        if len(getattr(store, "current_shard_filenames", ())) > 1:
            return read(store, key)
        dataset = _dataset(store, key)
        bits = dataset.attrs.get("dtype") == "bfloat16"
        if dataset.nbytes < _READ_WHOLE_BELOW or not (bits or dataset.dtype.kind == "f"):
            return read(store, key)
        return SavedArray(dataset, np.dtype(ml_dtypes.bfloat16) if bits else dataset.dtype)

    return get
