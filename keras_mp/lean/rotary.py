"""Rotary positions: queries and keys are rotated by their position, so that scores know the distance alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def rotate(x: Any, frequencies: Sequence[float]) -> Any:
    """Rotates pairs of features by an angle that grows with the row, in float32 inside.

        a, b = halves of the features of row i
        angle = i frequencies
        result = a cos(angle) - b sin(angle), b cos(angle) + a sin(angle)

    Feature j is in a pair with feature `j + features / 2`, as in the files of weights that Hugging Face and KerasHub
    publish; Meta's own code pairs neighbours, so its kernels have another order. The backward pass needs the sines and
    cosines alone.

    Args:
        x: floats, shape `(batch, rows, heads, features)`; rows may be unknown.
        frequencies: radians a row, `features / 2` numbers.

    Returns:
        A tensor of the same shape and dtype.

    References:
        Su et al., "RoFormer", 2021 (arXiv:2104.09864), equation 34.
    """
    rows = keras.ops.arange(keras.ops.shape(x)[1], dtype="float32")
    angles = keras.ops.expand_dims(rows, 1) * keras.ops.convert_to_tensor(frequencies, "float32")
    cosine, sine = (keras.ops.expand_dims(f(angles), 1) for f in (keras.ops.cos, keras.ops.sin))
    first, second = keras.ops.split(keras.ops.cast(x, "float32"), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return keras.ops.cast(keras.ops.concatenate(rotated, axis=-1), x.dtype)
