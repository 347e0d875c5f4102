"""Interleaves the measurements of several workloads, so that other load on the machine meets all of them alike.

for each round, for each workload, beginning with another one each time:  seconds of a few steps
ratio of a workload to the base = median over the rounds of (its seconds / the base's seconds in that round)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from keras_mp.system.whole_number import whole_number


class Spread(NamedTuple):
    """The median of some measurements, and their quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Computes the quartiles, as Hyndman and Fan's definition 7 has them (Python's "inclusive", numpy's default).

    Raises:
        ValueError: for no values.
    """
    if not values:
        raise ValueError("values must hold at least one measurement, got none")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def steps_per_round(seconds_per_step: float, seconds_per_round: float) -> int:
    """How many steps take about so many seconds; at least 1."""
    return max(1, math.ceil(seconds_per_round / max(seconds_per_step, 1e-9)))


def interleave(
    runs: Mapping[str, Callable[[int], float]], steps: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Runs each workload once a round.

    Args:
        runs: by workload, a function that runs a number of steps and returns the seconds that they took.
        steps: of each workload in a round.
        rounds: how many there are.

    Returns:
        The seconds of one step, for each workload and round.

    Raises:
        ValueError: for less than one round.
    """
    whole_number("rounds", rounds)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % max(1, len(names))
        for name in names[first:] + names[:first]:
            seconds[name].append(runs[name](steps[name]) / steps[name])
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Spread:
    """How long a workload takes, as a multiple of the base: of each round, and then the median and quartiles.

    Raises:
        ValueError: if the two were not measured in as many rounds.
    """
    if len(seconds) != len(base):
        raise ValueError(f"seconds and base must have as many rounds, got {len(seconds)} and {len(base)}")
    return spread([mine / other for mine, other in zip(seconds, base, strict=True)])
