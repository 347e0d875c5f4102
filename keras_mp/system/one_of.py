"""The check of an argument that chooses among a few words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Checks an argument that is one of few words.

    Returns:
        The value.

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
