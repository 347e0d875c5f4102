"""What several rooms need of TensorFlow and JAX.

Both folders have the same public functions. A room has functions of its own in its modules `_tensorflow` and `_jax`, of
which `engine_of` imports one.
"""

from importlib import import_module
from types import ModuleType

import keras

if keras.backend.backend() == "tensorflow":
    from keras_mp.backend.tensorflow import *
elif keras.backend.backend() == "jax":
    from keras_mp.backend.jax import *
else:
    raise ImportError(
        f"keras_mp runs on the backends 'tensorflow' and 'jax', and Keras runs on {keras.backend.backend()!r} here. "
        "Set the environment variable KERAS_BACKEND to one of the two before Keras is first imported."
    )


def engine_of(package: str) -> ModuleType:
    """Imports a room's `_tensorflow` or `_jax`; rooms as "keras_mp.lean"."""
    return import_module(f"{package}._{keras.backend.backend()}")
