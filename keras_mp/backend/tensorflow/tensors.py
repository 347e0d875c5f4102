"""Tensors and their bits."""

from typing import Any

import keras
import tensorflow as tf


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns a tensor as it is."""
    # Keras alone hands TensorFlow's variable through, which a function with a gradient of its own refuses.
    return tf.convert_to_tensor(keras.ops.convert_to_tensor(x))


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return tf.bitcast(x, dtype)
