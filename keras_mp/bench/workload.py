"""What a benchmark runs: the contract between `keras_mp.bench.worker` and what builds subjects for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Subject(NamedTuple):
    """Something that a benchmark runs; what a function that is named in a `Task` returns.

    Args:
        run: runs a number of steps, waits for them, and returns the seconds that they took.
        details: what to say of it besides; anything that JSON has.
        peak: the most memory in use on the accelerator so far, in bytes; None on a CPU, where the process is asked.
    """

    run: Callable[[int], float]
    details: dict[str, Any]
    peak: Callable[[], int | None] | None = None


class CannotRunError(ValueError):
    """A subject cannot run here; the message is the reason."""
