"""What a benchmark runs: the contract between `keras_mp.bench.worker` and the functions that build workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Workload(NamedTuple):
    """Something that a benchmark runs: the function that a `Task` names returns one.

    Args:
        run: runs a number of steps, waits for them, and returns the seconds that they took.
        details: further facts for its row of the report; anything that JSON has.
        peak: the most memory in use on the accelerator so far, in bytes; None on a CPU, where the process is asked.
    """

    run: Callable[[int], float]
    details: dict[str, Any]
    peak: Callable[[], int | None] | None = None


class CannotRunError(ValueError):
    """A workload cannot run here; the message is the reason."""
