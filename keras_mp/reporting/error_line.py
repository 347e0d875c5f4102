"""An error in one line."""

from __future__ import annotations

import re

_LONGEST = 500
_STYLE = re.compile(r"\x1b\[\d*m")  # of a terminal
_FUNCTION_NODE = re.compile(r"\{\{function_node [^}]*\}\} ?")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")


def error_line(error: BaseException) -> str:
    """Names an error and its reason, without the arrays and stacks that frameworks add.

    Returns:
        The error's type and the first line of its message; where Keras says first in which layer it was raised, the
        line after that too.
    """
    text = _NODE.sub(r"\1", _FUNCTION_NODE.sub("", _STYLE.sub("", str(error))))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 2 if text.startswith("Exception encountered") else 1
    return f"{type(error).__name__}: {' '.join(lines[:count])[:_LONGEST].rstrip()}"
