"""What the tests of exports share: the model in float32, the outputs of a SavedModel, and which backend they need."""

import importlib.util

import keras
import numpy as np
import pytest

from keras_mp.conversion.to_float32 import to_float32
from keras_mp.rebuild.model import rebuild

TENSORFLOW = keras.backend.backend() == "tensorflow"
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="it writes and reads files"
)
only_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="each export from JAX starts a process: few tests have it")


def in_float32(model, batch):
    """The outputs of a model that is rebuilt in float32."""
    return keras.tree.flatten(rebuild(model, to_float32, policy="float32").model(batch, training=False))


def served(path, batch):
    """The outputs of a SavedModel, as NumPy arrays."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # named, because its functions do not keep its variables alive
    return keras.tree.map_structure(np.asarray, loaded.serve(keras.tree.map_structure(tf.constant, batch)))


def in_int32(batch):
    """A batch whose integers are those that files take."""
    return keras.tree.map_structure(lambda x: x.astype("int32") if x.dtype == "int64" else x, batch)
