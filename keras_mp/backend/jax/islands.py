"""Islands of jitted code, which JAX has none of: its step is one program."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def has_islands() -> bool:
    """Returns False."""
    return False


def without_islands() -> AbstractContextManager[None]:
    """A scope that does nothing."""
    return nullcontext()


def update_in_one_program(update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool) -> None:
    """Calls a function with gradients."""
    del keeps_rows
    update(gradients)
