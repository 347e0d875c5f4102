"""Large weights, made and loaded in the devices' parts."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np

from keras_mp.backend.common.keras_patches import Make
from keras_mp.backend.common.keras_private import in_stateless_scope, saving_lib
from keras_mp.rebuild.walk import package_of

_COMPILED_FROM = 2**20
"""Bytes of a weight from which its initial values are worth a compilation."""
_READ_WHOLE_BELOW = 2**20
"""Bytes of an array of a weights file that are read at once."""


def in_parts() -> dict[str, Make]:
    """Returns Keras's patches for variables with a layout."""
    return {
        "keras.Variable._initialize_with_initializer": _initialized,
        "keras.Variable.assign": _assigned,
        "keras.src.saving.saving_lib.H5IOStore.__getitem__": _unread,
    }


def _initialized(initialize: Callable[..., None]) -> Callable[..., None]:
    """Has devices compute their parts of large initial values."""

    def initialized(variable: keras.Variable, initializer: Any) -> None:
        variable._initialize_layout()
        shape, dtype = tuple(variable.shape), jnp.dtype(variable._dtype)
        large = math.prod(shape) * dtype.itemsize >= _COMPILED_FROM
        # Keras's own are known to be what their config says.
        known = isinstance(initializer, keras.initializers.Initializer) and package_of(type(initializer)) == "keras"
        if variable._layout is None or not large or not known:
            return initialize(variable, initializer)
        config = {name: value for name, value in initializer.get_config().items() if name != "seed"}
        said = json.dumps(config, sort_keys=True, default=repr)
        key = (type(initializer), said, shape, str(dtype), _sharding(variable))
        if key not in _programs:
            _programs[key] = _program(initializer, shape, str(dtype), _sharding(variable))
        # The seed that the initializer would draw with, as an array; of one without a seed, any.
        seed = getattr(initializer, "seed", 0)
        seed = seed.next() if isinstance(seed, keras.random.SeedGenerator) else np.array([seed, 0], "uint32")
        # Waited for, so that what a computation needs beside its result is gone before the next begins.
        variable._direct_assign(jax.block_until_ready(_programs[key](seed)))

    return initialized


def _assigned(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Copies of an array to each device its part alone."""

    def assigned(variable: keras.Variable, value: Any) -> Any:
        layout, dtype = variable._layout, jnp.dtype(variable._dtype)
        if (
            layout is None
            or not isinstance(value, (np.ndarray, SavedArray))
            or value.shape != tuple(variable.shape)
            or not (value.dtype == dtype or (_is_float(value.dtype) and _is_float(dtype)))
            or in_stateless_scope()
        ):
            return assign(variable, np.asarray(value) if isinstance(value, SavedArray) else value)

        def part(index: Any) -> np.ndarray:
            with np.errstate(over="ignore"):  # as in JAX, which makes it infinite
                # A copy: on a CPU an array of JAX may be a view of NumPy's, and would keep the whole.
                return np.asarray(value[index]).astype(dtype, copy=isinstance(value, np.ndarray))

        placed = jax.make_array_from_callback(value.shape, _sharding(variable), part)
        variable._direct_assign(jax.block_until_ready(placed))
        return placed

    return assigned


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _sharding(variable: keras.Variable) -> Any:
    return getattr(variable._layout, "backend_layout", variable._layout)


# One for all weights of an initializer and a shape: the seed is an argument.
_programs: dict[Any, Callable[[Any], jax.Array]] = {}


def _program(initializer: Any, shape: tuple[int, ...], dtype: str, sharding: Any) -> Callable[[Any], jax.Array]:
    """Compiles an initializer, from the seed to the values.

    JAX's random numbers do not depend on how they are split (`jax_threefry_partitionable`).
    """

    def values(seed: Any) -> Any:
        seeded = copy.copy(initializer)
        if hasattr(seeded, "seed"):
            seeded.seed = seed
        return seeded(shape, dtype=dtype)

    return jax.jit(values, out_shardings=sharding)


class SavedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Data set of h5py, read in parts; as NumPy's, whole.

    Of bfloat16 the file holds the bits alone, and `dtype` says what they are.
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


def _unread(read: Callable[..., Any]) -> Callable[..., Any]:
    """Has Keras's store of weights hand out large arrays unread."""

    def get(store: Any, key: str) -> Any:
        # The file of an array that several files hold parts of the layer of is closed before it is assigned.
        if len(getattr(store, "current_shard_filenames", ())) > 1:
            return read(store, key)
        # After Keras's own check, which refuses links to other files; 3.13.0 checks nothing.
        if hasattr(saving_lib, "safe_get_h5_dataset"):
            dataset = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
        else:
            dataset = store._h5_entry_group[key]
            dataset = store._verify_dataset(dataset) if hasattr(store, "_verify_dataset") else dataset
        bits = dataset.attrs.get("dtype") == "bfloat16"
        if dataset.nbytes < _READ_WHOLE_BELOW or not (bits or dataset.dtype.kind == "f"):
            return read(store, key)
        return SavedArray(dataset, np.dtype(ml_dtypes.bfloat16) if bits else dataset.dtype)

    return get
