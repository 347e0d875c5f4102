"""The range that nine of ten published times are in, by class, and how often it holds for sources that it is not from.

    python benchmarks/planner/intervals.py    # writes keras_mp/planner/time/intervals.json

A run's figure is the logarithm of its published time by the predicted one. The interval of a class is the median of its
runs, more and less by the distance that the conformal rule of ten takes: of n runs the ceil(0.9 (n + 1))-th smallest
distance from the median, so that at least nine runs are needed (Vovk, Gammerman, Shafer, "Algorithmic Learning in a
Random World", 2005; Lei et al., arXiv:1604.04173). A class with fewer runs, or with one source, takes a wider class's.

A run is held if its time is in the interval of its class, made anew from the runs of all other repositories. No
constant of the prediction is fitted to these runs: benchmarks/planner/fit_efficiency.py.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner.published_runs import RUNS, XLA, ratios
from keras_mp.planner.time.step_time import StepTime, classes
from keras_mp.precision.chips import parse_target

LEVEL = 0.9
LEAST_RUNS, LEAST_SOURCES = 9, 2
WRITTEN = Path(__file__).parents[2] / "keras_mp" / "planner" / "time" / "intervals.json"
PARTS = ("products", "other", "uncovered", "kernels")


class Scored(NamedTuple):
    """A run that XLA compiled and that is given a time.

    Args:
        name: the name of the run.
        figure: the logarithm of the published time by the predicted one.
        source: the repository that published it.
        classes: the run's classes, from the narrowest.
        chip: the name of the chip.
    """

    name: str
    figure: float
    source: str
    classes: tuple[str, ...]
    chip: str


def scored(results: Mapping[str, dict[str, Any]]) -> list[Scored]:
    """The runs that XLA compiled, but for those that are given no time."""
    rows = []
    for name, ratio in ratios(dict(results)).items():
        run, result = RUNS[name], results[name]
        if run.group == XLA and not result.get("unscored"):
            chip = parse_target(run.target)[0]
            dominant = StepTime(*(result[part] for part in PARTS)).dominant
            rows.append(Scored(name, -math.log(ratio), source_of(run.source), (*classes(chip, dominant),), chip.name))
    return rows


def source_of(text: str) -> str:
    """The repository that a source begins with."""
    return text.split()[0].rstrip(",")


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """The ends of the interval, in logarithms: the median, more and less by the conformal distance."""
    middle = statistics.median(figures)
    distances = sorted(abs(figure - middle) for figure in figures)
    distance = distances[min(math.ceil(LEVEL * (len(figures) + 1)), len(figures)) - 1]
    return middle - distance, middle + distance


def members(rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """The runs of each class that has enough of them, of enough sources."""
    by_class: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        for name in row.classes:
            by_class[name].append(row)
    return {
        name: of_class
        for name, of_class in by_class.items()
        if len(of_class) >= LEAST_RUNS and len({row.source for row in of_class}) >= LEAST_SOURCES
    }


def left_out(rows: Sequence[Scored]) -> dict[str, tuple[float, float]]:
    """Of each run, the interval of its class from the runs of all other sources, in logarithms."""
    intervals = {}
    for source in {row.source for row in rows}:
        others = members([row for row in rows if row.source != source])
        for row in rows:
            if row.source == source:
                name = next(name for name in row.classes if name in others)
                intervals[row.name] = interval([other.figure for other in others[name]])
    return intervals


def table(results: Mapping[str, dict[str, Any]]) -> dict[str, tuple[float, float, int, int, int]]:
    """By class: the ends of the interval, the number of runs and of sources, and how many of the runs are held."""
    rows = scored(results)
    held = {row.name for row in rows if _is_in(row.figure, left_out(rows)[row.name])}
    return {
        name: (
            *(round(math.exp(end), 2) for end in interval([row.figure for row in of_class])),
            *(len(of_class), len({row.source for row in of_class}), sum(row.name in held for row in of_class)),
        )
        for name, of_class in sorted(members(rows).items())
    }


def _is_in(figure: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= figure <= ends[1]


def ranges_before(rows: Sequence[Scored]) -> dict[str, tuple[float, float] | None]:
    """Of each run, from the least to the most of the other sources' runs on its chip, or else of its generation."""
    ranges: dict[str, tuple[float, float] | None] = {}
    for row in rows:
        others = [other for other in rows if other.source != row.source]
        figures = [other.figure for other in others if other.chip == row.chip]
        figures = figures or [other.figure for other in others if other.classes[1] == row.classes[1]]
        ranges[row.name] = (min(figures), max(figures)) if figures else None
    return ranges


def coverage(rows: Sequence[Scored], ranges: Mapping[str, tuple[float, float] | None]) -> tuple[int, int, float]:
    """How many runs are in their range, how many have one, and the median of most by least."""
    known = {row: ends for row in rows if (ends := ranges[row.name]) is not None}
    width = math.exp(statistics.median(most - least for least, most in known.values())) if known else math.nan
    return sum(_is_in(row.figure, ends) for row, ends in known.items()), len(known), width


def main() -> None:
    from benchmarks.planner.predictions import kept

    lines = (f' "{name}": {json.dumps(figures)}' for name, figures in table(kept()).items())
    WRITTEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    rows = scored(kept())
    print(
        "held, with a range, most by least:",
        coverage(rows, left_out(rows)),
        "before:",
        coverage(rows, ranges_before(rows)),
    )


if __name__ == "__main__":
    main()
