"""Models of any size, of which no variable ever gets a value."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
from keras.src.backend.common import global_state  # private: Keras has no public way to forget variables


@contextmanager
def shapes_alone() -> Iterator[None]:
    """A scope in which variables get no values; Keras would make them up when the next such scope ends."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    global_state.set_global_attribute("uninitialized_variables", [])
