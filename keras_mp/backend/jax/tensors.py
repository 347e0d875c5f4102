"""Tensors and their bits."""

from typing import Any

import jax
import keras


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns an array as it is."""
    return keras.ops.convert_to_tensor(x)


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, dtype)
