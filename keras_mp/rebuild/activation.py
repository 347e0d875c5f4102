"""What an activation is: Keras takes any callable, also one without a name."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import keras


class Activation(NamedTuple):
    """An activation, without what `functools.partial` puts around it.

    Attributes:
        function: the callable: a function, an object or a layer; `keras.activations.linear` for None.
        arguments: the arguments that are bound to it by name.
        name: the name, for messages; that of the class where the callable has none.
        registered: the name that Keras saves a function by; "" of another callable.
    """

    function: Any
    arguments: dict[str, Any]
    name: str
    registered: str


def activation_of(given: Any) -> Activation:
    """What a layer computes with, of the value that it has as its activation."""
    arguments: dict[str, Any] = {}
    while isinstance(given, functools.partial) and not given.args:
        arguments = {**given.keywords, **arguments}
        given = given.func
    function = keras.activations.linear if given is None else given
    named = hasattr(function, "__name__") and isinstance(function, Hashable)
    name = function.__name__ if named else type(function).__name__
    return Activation(function, arguments, name, keras.saving.get_registered_name(function) if named else "")
