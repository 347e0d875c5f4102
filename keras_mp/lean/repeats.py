"""Stretches of a sequence that repeat at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Items from `start` to `stop` (excluded), each of which equals the one `period` before it, where there is one."""

    start: int
    stop: int
    period: int

    @property
    def slack(self) -> int:
        """The items that are left over when the run is divided into periods."""
        return (self.stop - self.start) % self.period


def longest_runs(items: Sequence[Any], allowed: Any) -> list[Run]:
    """Finds the runs that cover most of a sequence, without overlap, longest first.

    Args:
        items: hashable; None repeats nothing.
        allowed: tells of a period's items whether they may be a run's period.

    Returns:
        Runs of at least two periods, in the order of the sequence. Of several periods of one run the shortest.
    """
    candidates = [run for period in range(1, len(items) // 2 + 1) for run in _runs_of(items, period)]
    candidates.sort(key=lambda run: (run.slack - (run.stop - run.start), run.period, run.start))
    taken: list[Run] = []
    for run in candidates:
        apart = all(run.stop <= other.start or run.start >= other.stop for other in taken)
        if apart and allowed(items[run.start : run.start + run.period]):
            taken.append(run)
    return sorted(taken)


def _runs_of(items: Sequence[Any], period: int) -> list[Run]:
    runs = []
    start = None
    for index in range(len(items) - period + 1):
        equal = index + period < len(items) and items[index] is not None and items[index] == items[index + period]
        if equal and start is None:
            start = index
        if not equal and start is not None:
            if index - start >= period and not _repeats_inside(items[start : start + period]):
                runs.append(Run(start, index + period, period))
            start = None
    return runs


def _repeats_inside(items: Sequence[Any]) -> bool:
    """Whether a period is itself made of equal shorter ones."""
    length = len(items)
    return any(
        length % shorter == 0 and list(items) == list(items[:shorter]) * (length // shorter)
        for shorter in range(1, length // 2 + 1)
    )
