"""How a model's inputs are called by those who give them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import keras


def input_names(structure: Any) -> list[str]:
    """Names for the inputs of a functional or sequential model.

    Args:
        structure: the structure of its inputs, of KerasTensors.

    Returns:
        A name for each, in the order of `keras.tree.flatten`: the key of the dict that it is in, else the name of its
        InputLayer. Keras calls the tensor itself "keras_tensor" where `keras.Input` was given no name.
    """
    keys = _keys(structure, None)
    tensors = keras.tree.flatten(structure)
    if len(set(keys)) == len(keys) and None not in keys:
        return [str(key) for key in keys]
    layers = [_layer_name(tensor) for tensor in tensors]
    names = [key if key is not None and keys.count(key) == 1 else name for key, name in zip(keys, layers, strict=True)]
    return names if len(set(names)) == len(names) else [tensor.name for tensor in tensors]


def _layer_name(tensor: Any) -> str:
    # Private, as there is no public way from a symbolic tensor to the layer that made it.
    history = getattr(tensor, "_keras_history", None)
    return history.operation.name if history else tensor.name


def _keys(structure: Any, key: str | None) -> list[str | None]:
    """The key of the innermost dict that each leaf is in, or None."""
    if isinstance(structure, Mapping):
        # As keras.tree flattens them.
        names = list(structure) if isinstance(structure, OrderedDict) else sorted(structure)
        return [leaf_key for name in names for leaf_key in _keys(structure[name], str(name))]
    if isinstance(structure, (list, tuple)):
        return [leaf_key for item in structure for leaf_key in _keys(item, key)]
    return [] if structure is None else [key]
