"""The check of an argument that chooses among a few words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Checks an argument that must be one of a few words.

    Returns:
        The value.

    Raises:
        ValueError: it is none of them; the message names the nearest, and all.
    """
    words = list(known)
    if isinstance(value, str) and value in words:
        return value
    raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, words))}.{did_you_mean(value, words)}")


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """The question whether the nearest of some words was meant; "" where none is near."""
    by_small = {word.lower(): word for word in known}
    near = difflib.get_close_matches(str(value).lower(), by_small, n=1)
    return f" Did you mean {by_small[near[0]]!r}?" if near else ""
