"""Runs subjects in turns, each in a process of its own, and keeps what was measured of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras_mp.bench.interleave import steps_of_a_turn, take_turns
from keras_mp.bench.process import Process, SubjectError


class Task(NamedTuple):
    """A subject to be measured.

    Args:
        name: of its row.
        function: "module:function", which returns a `keras_mp.bench.workload.Subject`.
        arguments: of the function; anything that JSON has.
        environment: of its process, such as `{"KERAS_BACKEND": "jax"}`.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


@dataclass
class Measured:
    """What was measured of a subject.

    Args:
        name: of the task.
        problem: why nothing was measured: "cannot run", "out of memory" or "failed"; "" otherwise.
        reason: of the problem, in a line.
        seconds: of one step, by round.
        first: seconds of the first step, which compiles.
        peak: the most bytes in use; None where the system does not tell.
        details: what the subject says of itself.
    """

    name: str
    problem: str = ""
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    first: float = math.nan
    peak: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def fails(self, error: SubjectError) -> None:
        """Notes a problem; what was measured before does not count."""
        self.problem, self.reason, self.seconds = error.kind, error.reason, []


def compare(
    tasks: Sequence[Task],
    *,
    rounds: int = 20,
    seconds: float = 0.5,
    paths: Sequence[str] = (),
    memory_limit: int | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Measures subjects in turns. One that fails is marked, and the others go on.

    Processes cannot share a chip of Google's; there all subjects live in one, and the peak of memory, which would be
    that of all, is left out.

    Args:
        tasks: the subjects.
        rounds: turns of each.
        seconds: of one turn, about; it has at least one step.
        paths: folders that the processes import from.
        memory_limit: the most bytes that one of them may hold.
        log: is called with a line of text for each thing that begins.

    Returns:
        What was measured, in the order of the tasks.

    Raises:
        ValueError: for less than one round.
    """
    measured = {task.name: Measured(task.name) for task in tasks}
    processes: dict[str, Process] = {}
    shared: Process | None = None
    started: list[Process] = []

    def way(name: str) -> Callable[[int], float]:
        def run(steps: int) -> float:
            if measured[name].problem:
                return math.nan
            try:
                return processes[name].ask("run", name=name, steps=steps)
            except SubjectError as error:
                measured[name].fails(error)
                return math.nan

        return run

    try:
        for task in tasks:
            log(f"{task.name}: builds and compiles")
            process = shared or Process(task.environment, paths, memory_limit)
            if process is not shared:
                started.append(process)
            mine = measured[task.name]
            try:
                mine.details = process.ask(
                    "load", name=task.name, function=task.function, arguments=dict(task.arguments)
                )
            except SubjectError as error:
                mine.fails(error)
                if process is not shared:
                    process.close()  # what it still holds, the others would miss
                    started.remove(process)
                continue
            mine.first = mine.details.pop("first")
            if mine.details.get("kind") == "tpu":
                shared = process
            processes[task.name] = process
        ways = {name: way(name) for name in processes}
        warm = {name: _warm(run) for name, run in ways.items()}
        steps = {name: steps_of_a_turn(each, seconds) for name, each in warm.items() if not measured[name].problem}
        log(f"{rounds} rounds of {', '.join(f'{count} x {name}' for name, count in steps.items())}")
        times = take_turns({name: ways[name] for name in steps}, steps, rounds)
        for name, each in times.items():
            if measured[name].problem:
                continue
            measured[name].seconds = each
            if shared is None:
                try:
                    measured[name].peak = processes[name].ask("peak", name=name)
                except SubjectError as error:
                    measured[name].fails(error)
    finally:
        for process in started:
            process.close()
    return list(measured.values())


def answer(task: Task, paths: Sequence[str] = ()) -> Any:
    """What a task's function returns in a process of its own; nothing is measured.

    Args:
        task: its function returns anything that JSON has.
        paths: folders that the process imports from.

    Raises:
        SubjectError: If it fails.
    """
    process = Process(task.environment, paths)
    try:
        return process.ask("call", function=task.function, arguments=dict(task.arguments))
    finally:
        process.close()


def device_of(rows: Sequence[Measured]) -> str:
    """The name of the device that rows were measured on."""
    return next((row.details["device"] for row in rows if row.details), "this machine")


def _warm(run: Callable[[int], float]) -> float:
    """Runs two steps, and returns the seconds of the second."""
    run(1)
    return run(1)
