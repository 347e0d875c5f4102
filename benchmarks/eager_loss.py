"""The cross-entropy of a program in PyTorch that does not compile its loss: each of its arrays is in memory, on JAX.

PyTorch's `cross_entropy(logits.float(), labels)` writes the logits in float32 and the logarithms of their softmax, and
keeps the latter for the backward pass, which writes the gradient of each in float32. XLA makes one kernel of it all, or
writes an array over the one that it is made of; barriers between the steps leave it the arrays of the source.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp import backend


def _written(array: Any, *made_of: Any) -> Any:
    """An array that is in memory, beside those that it is made of."""
    return backend.barrier([array], list(made_of))[0]


@jax.custom_vjp
def _cross_entropy(logits: Any, labels: Any) -> Any:
    return _forward(logits, labels)[0]


def _forward(logits: Any, labels: Any) -> tuple[Any, tuple[Any, Any]]:
    wide = _written(logits.astype("float32"))
    logarithms = _written(jax.nn.log_softmax(wide), wide)
    return -jnp.take_along_axis(logarithms, labels[..., None], -1)[..., 0], (logarithms, labels)


def _backward(kept: tuple[Any, Any], gradient: Any) -> tuple[Any, None]:
    logarithms, labels = kept
    of_logarithms = _written(-jax.nn.one_hot(labels, logarithms.shape[-1]) * gradient[..., None])
    of_logits = of_logarithms - jnp.exp(logarithms) * of_logarithms.sum(-1, keepdims=True)
    return _written(of_logits, logarithms, of_logarithms), None


_cross_entropy.defvjp(_forward, _backward)


class EagerCrossEntropy(keras.losses.Loss):
    """`keras.losses.SparseCategoricalCrossentropy(from_logits=True)` of float32 logits, with PyTorch's arrays."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The loss of each token, float32 of shape (..., tokens), of logits (..., tokens, classes)."""
        return _cross_entropy(y_pred, keras.ops.cast(y_true, "int32"))
