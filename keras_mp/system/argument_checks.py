"""Checks of arguments that occur everywhere."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Iterable
from typing import Any


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Checks and returns an argument of few words.

    Raises:
        ValueError: it is none of them; the message names the nearest, and all.
    """
    words = list(known)
    if isinstance(value, str) and value in words:
        return value
    raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, words))}.{did_you_mean(value, words)}")


def did_you_mean(value: Any, known: Iterable[str], *spellings: str) -> str:
    """Asks whether a near, known word was meant; "" without."""
    by_small = {word.lower(): word for word in known}
    texts = [str(value).lower(), *spellings]
    near = dict.fromkeys(word for text in texts for word in difflib.get_close_matches(text, by_small, n=1))
    return f" Did you mean {' or '.join(repr(by_small[word]) for word in near)}?" if near else ""


def whole_number(name: str, value: Any, minimum: int = 1, unit: str = "", otherwise: str = "") -> int:
    """Checks and returns an argument that is a whole number.

    Args:
        value: an int, also one of NumPy's. A bool or 2.0 is none.
        unit: a unit for the message, such as "steps".
        otherwise: words for the message that say what is right besides, such as "or None for all".

    Raises:
        ValueError: it is no whole number, or below the minimum.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        kind = f"a whole number of {unit}" if unit else "a whole number"
        raise ValueError(f"{name}={value!r} must be {kind}, {minimum} or more{otherwise and f', {otherwise}'}")
    return number


def takes(function: Any, name: str) -> bool:
    """Whether a function can be given such an argument."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
