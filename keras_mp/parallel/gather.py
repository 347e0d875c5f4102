"""A model that several devices or processes trained, on one device."""

from __future__ import annotations

import keras

from keras_mp import backend
from keras_mp.rebuild import rebuild, unchanged


def gather(model: keras.Model) -> keras.Model:
    """A copy of a model on one device of this process, to save, export and predict with; call it outside the scope.

    Where several processes trained the model, all of them must call it.

    Args:
        model: built in the scope of `keras_mp.distribute`, or not.

    Returns:
        A new model with the same weights, compiled alike, with the optimizer's state; the model itself where it lies on
        one device already.
    """
    return rebuild(model, unchanged).told(f"gather({model.name!r})") if backend.is_spread(model) else model
