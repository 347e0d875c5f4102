"""Checks of arguments that occur everywhere."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, minimum: int = 1, unit: str = "", otherwise: str = "") -> int:
    """Checks an argument that must be a whole number.

    Args:
        value: the value that the argument was given: an int, also one of NumPy's. A bool or 2.0 is none.
        unit: a unit for the message, such as "steps".
        otherwise: words for the message that say what is right besides, such as "or None for all".

    Returns:
        The number.

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
