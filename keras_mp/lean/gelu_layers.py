"""Layers whose GELU keeps only its input while they train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_mp.lean.gelu import gelu
from keras_mp.lean.phase import may_be_differentiated

_EXACT = functools.partial(gelu, approximate=False)
# KerasHub's GELU by tanh, which its models register under both names.
_BY_TANH = ("keras_hub>gelu_approximate", "keras_nlp>gelu_approximate")


def lean_gelu(activation: Any) -> Callable[[Any], Any] | None:
    """The same GELU with less memory; None for any other activation.

    Args:
        activation: a function, such as a layer's `activation`.
    """
    if activation is keras.activations.gelu:
        return _EXACT
    if activation is keras.ops.gelu or _registered_name(activation) in _BY_TANH:
        return gelu
    return None


def _registered_name(function: Any) -> str:
    return keras.saving.get_registered_name(function) if callable(function) else ""


class LeanGelu:
    """Has the lean GELU as its activation while it trains, and its own else."""

    @property
    def activation(self) -> Any:
        plain = vars(self)["activation"]
        return (lean_gelu(plain) or plain) if may_be_differentiated() else plain

    @activation.setter
    def activation(self, function: Any) -> None:
        vars(self)["activation"] = function
