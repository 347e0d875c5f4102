"""The types of what both backends are given to look into a step, and of what they say about it."""

from collections.abc import Callable
from typing import Any

# tap(tensor, watch): the tensor to go on with, or None where it cannot be seen.
Tap = Callable[[Any, bool], Any]
# The file of a line of Python, and its number.
Frame = tuple[str, int]
