"""Calls of live layers: their methods wrapped for a while, scopes that stand for a call, and the policy around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import keras

# Makes the name scope of a layer's next call, while a step is lowered.
scopes: ContextVar[Callable[[Any], AbstractContextManager] | None] = ContextVar("scopes", default=None)


@contextmanager
def wrapped_methods(
    layers: Iterable[tuple[str, Any]], names: Iterable[str], wrap: Callable[..., Callable[..., Any]]
) -> Iterator[None]:
    """Scope in which methods of layers are replaced.

    Args:
        layers: (path, layer) pairs; operations that are no layers are welcome.
        names: the names of the methods; a layer that has none of a name is left alone.
        wrap: `wrap(path, layer, name, function)` returns the function to call instead.
    """
    layers, names = list(layers), list(names)
    methods = [(path, layer, name) for path, layer in layers for name in names if callable(getattr(layer, name, None))]
    # The instance's own dict, because Keras's __setattr__ tracks what it is given.
    hidden = [(layer, name, vars(layer).get(name)) for _, layer, name in methods]
    try:
        for path, layer, name in methods:
            vars(layer)[name] = wrap(path, layer, name, getattr(layer, name))
        yield
    finally:
        for layer, name, before in hidden:
            vars(layer).pop(name, None)
            if before is not None:
                vars(layer)[name] = before


def call_scope(layer: Any) -> AbstractContextManager:
    """Scope in which operations count as a layer's call.

    Args:
        layer: the layer; where no step is lowered that has it, the scope does nothing.
    """
    scope = scopes.get()
    return nullcontext() if scope is None else scope(layer)


@contextmanager
def restored_policy(policy: Any = None) -> Iterator[None]:
    """Puts back the global dtype policy after a `with` block; sets one within, if given."""
    previous = keras.mixed_precision.dtype_policy()
    try:
        if policy is not None:
            keras.mixed_precision.set_global_policy(policy)
        yield
    finally:
        keras.mixed_precision.set_global_policy(previous)
