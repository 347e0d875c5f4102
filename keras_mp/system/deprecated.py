"""Names that have changed: the old one works for one more version, with a DeprecationWarning."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function, or the `__init__` of a class, whose arguments have new names.

        @renamed_arguments(say="log")
        def benchmark(model, batch, *, log=None): ...

        benchmark(model, batch, say=print)  # DeprecationWarning: benchmark(say=...) is now benchmark(log=...)

    Args:
        **new_names: the old name of each argument, and its new one.

    Returns:
        The decorator. The function's signature has the new names alone.

    Raises:
        TypeError: in a call, where an argument is given by both names; while decorating, where the function has no
            argument of a new name, or still has one of an old name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        called = function.__qualname__.removesuffix(".__init__")
        for old, new in new_names.items():
            if old in signature.parameters or new not in signature.parameters:
                raise TypeError(f"{called}{signature} must have an argument {new!r}, and none named {old!r}")

        @functools.wraps(function)
        def with_new_names(*args: Any, **kwargs: Any) -> R:
            for old in [name for name in kwargs if name in new_names]:
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{called}() got {new!r} and {old!r}, two names of one argument: give {new!r} only")
                warn_renamed(f"{called}({old}=...)", f"{called}({new}=...)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        # For inspect.getfullargspec, which Keras uses and which does not look behind a decorator.
        with_new_names.__signature__ = signature  # type: ignore[attr-defined]
        return with_new_names

    return decorate


class RenamedAttribute:
    """The old name of an attribute or a method, set in the body of the class: it reads and writes the new one.

        class Callback:
            keep = RenamedAttribute("max_to_keep")

    Args:
        new_name: the attribute's new name.
    """

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self.old_name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None and not hasattr(owner, self.new_name):
            return self  # as a property: only instances have the attribute
        self._warn(owner)
        return getattr(owner if instance is None else instance, self.new_name)

    def __set__(self, instance: Any, value: Any) -> None:
        self._warn(type(instance))
        setattr(instance, self.new_name, value)

    def _warn(self, owner: type) -> None:
        warn_renamed(f"{owner.__name__}.{self.old_name}", f"{owner.__name__}.{self.new_name}", stacklevel=3)


def renamed_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a module whose functions or classes have new names.

        __getattr__ = renamed_names(__name__, {"find_batch": "find_max_batch_size"})

    Args:
        module: the module's name.
        new_names: the old name of each, and its new one: a name of the same module, or `package.module:name`.

    Returns:
        The function to assign to `__getattr__`.
    """

    def get(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new_module, _, new_name = new_names[name].rpartition(":")
        new_module = new_module or module
        warn_renamed(f"{module}.{name}", f"{new_module}.{new_name}")
        return getattr(importlib.import_module(new_module), new_name)

    return get


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warns that a name has changed.

    Args:
        old: the old name.
        new: the new one.
        stacklevel: the frame that the warning names: 1 for the caller of this function, 2 for its caller, and so on.
    """
    message = f"{old} is now {new}; the old name works in this version and is removed in the next"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)
