"""Bytes, errors and names as text that people read."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_LONGEST_ERROR = 500
_STYLE = re.compile(r"\x1b\[\d*m")  # of a terminal
_NUMBER = re.compile(r"\d+")
_FUNCTION_NODE = re.compile(r"\{\{function_node [^}]*\}\} ?")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")


def byte_size(count: float) -> str:
    """Writes a number of bytes: "10 bytes", "12.3 KiB"."""
    size, unit = float(count), 0
    # 1023.95 would be printed as 1024.0 of the smaller unit.
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count:,.0f} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def error_line(error: BaseException) -> str:
    """Names an error and its reason, without arrays and stacks.

    Returns:
        The error's type and the first line of its message; where Keras says first in which layer it was raised, the
        line after that too.
    """
    text = _NODE.sub(r"\1", _FUNCTION_NODE.sub("", _STYLE.sub("", str(error))))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 2 if text.startswith("Exception encountered") else 1
    return f"{type(error).__name__}: {' '.join(lines[:count])[:_LONGEST_ERROR].rstrip()}"


def shorten_middle(text: str, width: int) -> str:
    """Shortens a text over `width` characters, with "..." inside.

    Of a path the end is the layer's own name, the beginning the block that it is in.
    """
    if len(text) <= width:
        return text
    if width <= 4:
        return text[:width]
    end = (width - 2) // 2
    return f"{text[: width - 3 - end]}...{text[-end:]}"


def without_numbers(name: str) -> str:
    """Replaces a name's numbers by "*", alike for repeated blocks."""
    return _NUMBER.sub("*", name)


def pattern_of(names: Sequence[str]) -> str:
    """Writes names as one, with "*" where numbers differ."""
    numbers = zip(*map(_NUMBER.findall, names), strict=True)
    written = [group[0] if len(set(group)) == 1 else "*" for group in numbers]
    return "".join(text + number for text, number in zip(_NUMBER.split(names[0]), [*written, ""], strict=True))


def listed(names: Sequence[str], width: int, noun: str) -> str:
    """Lists names, "a, b and c" or "12 layers, ..."."""
    text = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
    if len(text) <= width or len(names) < 2:
        return shorten_middle(text, width)
    count = f"{len(names)} {noun}"
    half = (width - len(f"{count},  to ")) // 2
    return f"{count}, {shorten_middle(names[0], half)} to {shorten_middle(names[-1], half)}"
