"""Measures workloads in processes, interleaved: other load meets all alike.

for each round, for each workload, beginning with another one each time:  seconds of a few steps
ratio of a workload to the base = median over the rounds of (its seconds / the base's seconds in that round)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from keras_mp.bench.process import Process, WorkloadError


class Workload(NamedTuple):
    """Work that a benchmark runs; a `Task`'s function returns one."""

    run: Callable[[int], float]  # runs a number of steps, waits for them, and returns the seconds that they took
    details: dict[str, Any]  # further facts for its row of the report; anything that JSON has
    peak: Callable[[], int | None] | None = None  # most bytes in use on the accelerator so far; None on a CPU


class CannotRunError(ValueError):
    """A workload cannot run here; the message is the reason."""


class Task(NamedTuple):
    """A workload to be measured."""

    name: str  # of its row in the report
    function: str  # "module:function", which returns a `Workload`
    arguments: Mapping[str, Any] = {}  # of the function; anything that JSON has
    environment: Mapping[str, str] = {}  # of its process, such as `{"KERAS_BACKEND": "jax"}`


@dataclass
class Measured:
    """What was measured of a workload."""

    name: str
    problem: str = ""  # where nothing was measured: "cannot run", "out of memory" or "failed"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)  # of one step, by round
    first: float = math.nan  # seconds of the first step, which compiles
    peak: int | None = None  # the most bytes in use; None where the system does not tell
    details: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def noting_problem(self) -> Iterator[None]:
        """Notes a failure; what was measured before does not count."""
        try:
            yield
        except WorkloadError as error:
            self.problem, self.reason, self.seconds = error.kind, error.reason, []


def compare(
    tasks: Sequence[Task],
    *,
    rounds: int = 20,
    seconds: float = 0.5,
    paths: Sequence[str] = (),
    log: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Measures workloads, interleaved.

    One that fails is marked, and the others go on. Processes cannot share a chip of Google's; there all workloads live
    in one, and the peak of memory, which would be that of all, is left out.

    Args:
        seconds: the seconds that each runs in a round, about; it runs at least one step.
        log: a function that is called with a line of text when a measurement starts.
    """
    rows = {task.name: Measured(task.name) for task in tasks}
    with contextlib.closing(_Workers(paths)) as workers:
        for task in tasks:
            log(f"{task.name}: builds and compiles")
            row = rows[task.name]
            with row.noting_problem():
                row.details = workers.load(task)
                row.first = row.details.pop("first")
        runs = {name: partial(_run, workers, row) for name, row in rows.items() if not row.problem}
        second = {}  # the seconds of the second step
        for name, run in runs.items():
            run(1)
            second[name] = run(1)
        running = [name for name in runs if not rows[name].problem]
        steps = {name: max(1, math.ceil(seconds / max(second[name], 1e-9))) for name in running}
        log(f"{rounds} rounds of {', '.join(f'{count} x {name}' for name, count in steps.items())}")
        for name, times in interleave({name: runs[name] for name in steps}, steps, rounds).items():
            row = rows[name]
            if not row.problem:
                row.seconds = times
                with row.noting_problem():  # one process for all has the peak of all
                    row.peak = None if workers.shared is not None else workers.ask("peak", name)
    return list(rows.values())


class _Workers:
    """The processes of workloads: one each, or one for all."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._by_workload: dict[str, Process] = {}
        self.shared: Process | None = None

    def load(self, task: Task) -> dict[str, Any]:
        """Builds a workload, runs its first step, returns details."""
        process = self.shared or Process(task.environment, self._paths)
        try:
            details = process.ask("load", name=task.name, function=task.function, arguments=dict(task.arguments))
        except BaseException:
            if process is not self.shared:
                process.close()  # the others need the memory that it still holds
            raise
        self._by_workload[task.name] = process
        if details.get("kind") == "tpu":
            self.shared = process
        return details

    def ask(self, do: str, name: str, **arguments: Any) -> Any:
        """Asks the process of a workload: see `Process.ask`."""
        return self._by_workload[name].ask(do, name=name, **arguments)

    def close(self) -> None:
        """Ends all processes."""
        for process in set(self._by_workload.values()):
            process.close()


def _run(workers: _Workers, row: Measured, steps: int) -> float:
    """Runs some steps; NaN once the workload has failed."""
    if not row.problem:
        with row.noting_problem():
            return workers.ask("run", row.name, steps=steps)
    return math.nan


def device_of(rows: Sequence[Measured]) -> str:
    """The name of the device that rows were measured on."""
    return next((row.details["device"] for row in rows if row.details), "this machine")


class Spread(NamedTuple):
    """The median of some measurements, and their quartiles."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Spread:
    """Computes quartiles as NumPy does by default."""
    return Spread(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def interleave(
    runs: Mapping[str, Callable[[int], float]], steps: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Runs each workload once a round.

    Args:
        runs: a function for each workload that runs a number of steps and returns the seconds that they took.

    Returns:
        The seconds of one step, for each workload and round.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % max(1, len(names))
        for name in names[first:] + names[:first]:
            seconds[name].append(runs[name](steps[name]) / steps[name])
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Spread:
    """Divides a workload's time by the base's, round by round."""
    return quartiles([mine / other for mine, other in zip(seconds, base, strict=True)])
