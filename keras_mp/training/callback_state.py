"""What a training has changed in the plain attributes of a callback: counters, best values, histories."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import keras
import numpy as np

_PLAIN = (bool, int, float, str, type(None))


def snapshot(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Copies the attributes that are numbers, texts, arrays, or lists and dicts of such; not the settings.

    Settings are what has the name of an argument of `__init__`: some callbacks turn their sign as training begins.

    Args:
        callback: a Keras callback.

    Returns:
        Copies of their values, by name.
    """
    settings = {"params", *inspect.signature(type(callback).__init__).parameters}
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if name not in settings and _is_plain(value)
    }


def changed(callback: keras.callbacks.Callback, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain attributes that have other values than in a snapshot."""
    return {name: value for name, value in snapshot(callback).items() if not _same(value, before.get(name, before))}


def to_json(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    """Turns a plain value into one that JSON can hold; arrays are put aside under names that begin with `name`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        key = f"{name}/{len(arrays)}"
        arrays[key] = value
        return {"array": key}
    if isinstance(value, (list, tuple)):
        return [to_json(item, arrays, name) for item in value]
    if isinstance(value, dict):
        return {"items": [[key, to_json(item, arrays, name)] for key, item in value.items()]}
    return value


def from_json(value: Any, arrays: Any) -> Any:
    """The inverse of `to_json`; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json(item, arrays) for item in value]
    if isinstance(value, dict) and "array" in value:
        return arrays[value["array"]]
    if isinstance(value, dict):
        return {key: from_json(item, arrays) for key, item in value["items"]}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (*_PLAIN, np.ndarray, np.generic))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)
