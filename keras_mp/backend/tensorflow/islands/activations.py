"""Keras's GELU and SiLU as islands, in a training step on a CPU.

    silu(x) = x s(x),    gradient = upstream s(x) (1 + x (1 - s(x))),    s(x) = 1 / (1 + e^-x)

In float32 inside. Elfwing, Uchibe, Doya, "Sigmoid-Weighted Linear Units", 2017 (arXiv:1702.03118).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import tensorflow as tf

from keras_mp.backend.common.keras_patches import Make
from keras_mp.backend.tensorflow.islands.programs import (
    has_known_sizes,
    in_differentiated_island,
    is_differentiated_island,
)

Gelu = Callable[[Any, bool], Any]


@cache  # so that two scopes with the same GELU replace Keras's once
def gelu_by(replacement: Gelu) -> Make:
    """Makes what makes the replacement of Keras's GELU, given a `gelu(x, approximate)` of jitted programs."""

    def make(keras_own: Callable[..., Any]) -> Callable[..., Any]:
        def gelu(x: Any, approximate: bool = True) -> Any:
            x = tf.convert_to_tensor(x)
            if x.dtype.is_floating and has_known_sizes(x) and is_differentiated_island():
                return replacement(x, approximate)
            return keras_own(x, approximate)

        return gelu

    return make


def silu(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's SiLU."""

    def silu(x: Any) -> Any:
        x = tf.convert_to_tensor(x)
        y = in_differentiated_island(_silu_forward, _silu_backward, [x], None) if x.dtype.is_floating else None
        return keras_own(x) if y is None else y

    return silu


def _silu_forward(x: tf.Tensor, how: None) -> tf.Tensor:
    del how
    wide = tf.cast(x, tf.float32)
    return tf.cast(wide * tf.sigmoid(wide), x.dtype)


def _silu_backward(upstream: tf.Tensor, x: tf.Tensor, how: None) -> list[tf.Tensor]:
    del how
    wide, upstream = tf.cast(x, tf.float32), tf.cast(upstream, tf.float32)
    gate = tf.sigmoid(wide)
    return [tf.cast(upstream * gate * (1.0 + wide * (1.0 - gate)), x.dtype)]
