"""The data of a check: a few batches, whatever they come in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_mp.system.whole_number import whole_number


def batches_of(data: Any, steps: int, name: str = "data") -> list[tuple]:
    """Reads the first batches of some data.

    Args:
        data: an iterable of batches `(x, y)` or `(x, y, sample_weight)`: a tf.data.Dataset, a keras.utils.PyDataset, a
            generator, a list; or one such tuple of arrays, which is one batch.
        steps: how many batches to read; fewer are fine, but one there must be.
        name: of the argument, for messages.

    Returns:
        A list of tuples `(x, y, sample_weight)` of numpy arrays.

    Raises:
        TypeError: data is nothing to iterate over, or a batch is no tuple.
        ValueError: steps is not positive, there is no batch, a batch is empty, or x and y differ in length.
    """
    steps = whole_number("steps", steps, unit="batches")
    batches = [_batch(part, f"batch {place} of {name}") for place, part in enumerate(_taken(data, steps, name))]
    if not batches:
        raise ValueError(f"{name} is empty: at least one batch (x, y) is needed")
    return batches


def _taken(data: Any, steps: int, name: str) -> Iterator[Any]:
    if isinstance(data, keras.utils.PyDataset):
        return (data[index] for index in range(min(steps, data.num_batches or steps)))
    if isinstance(data, tuple) and len(data) in (1, 2, 3) and not _is_batch(data[0]):
        return iter([data])
    if isinstance(data, (str, bytes, dict, np.ndarray)) or not isinstance(data, Iterable):
        raise TypeError(f"{name} is a {type(data).__name__}: pass batches (x, y), or one tuple (x, y) of arrays")
    return itertools.islice(iter(data), steps)


def _is_batch(thing: Any) -> bool:
    return isinstance(thing, tuple) and len(thing) in (2, 3)


def _batch(batch: Any, name: str) -> tuple:
    if isinstance(batch, list) and len(batch) in (2, 3):
        batch = tuple(batch)
    if not isinstance(batch, tuple) or len(batch) not in (1, 2, 3):
        given = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
        raise TypeError(f"{name} is {given}: (x, y) or (x, y, sample_weight) is needed")
    batch = keras.tree.map_structure(_array, tuple(_strings_as_array(part) for part in batch))
    x, y, sample_weight = (*batch, None, None)[:3]
    arrays = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    lengths = {len(array) for array in arrays if array.ndim}
    if len(lengths) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{name} holds arrays of different lengths: {shapes}")
    if 0 in lengths or not arrays:
        raise ValueError(f"{name} is empty: it has no record")
    return x, y, sample_weight


def _strings_as_array(part: Any) -> Any:
    """A list of strings is one array of them, not a structure of many."""
    whole = isinstance(part, (list, tuple)) and part and all(isinstance(leaf, (str, bytes)) for leaf in part)
    return np.asarray(part) if whole else part


def _array(leaf: Any) -> Any:
    if leaf is None:
        return None
    array = np.asarray(leaf)
    if array.dtype == np.float64:
        return array.astype(keras.config.floatx())
    return array
