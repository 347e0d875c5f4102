"""Workloads have a process each; one that fails is marked, and the others go on."""

from pathlib import Path

import pytest

from keras_mp.bench.process import Process
from keras_mp.bench.workloads import Task, compare

HERE = [str(Path(__file__).parent)]


def task(name, function, **arguments):
    return Task(name, f"workloads_for_tests:{function}", arguments)


def test_two_are_measured_in_processes_of_their_own():
    tasks = [task("fast", "sleeper", seconds=0.01), task("slow", "sleeper", seconds=0.03)]
    tasks[1] = tasks[1]._replace(environment={"KERAS_BACKEND": "none"})
    fast, slow = compare(tasks, rounds=3, seconds=0.05, paths=HERE)
    assert (fast.problem, slow.problem) == ("", "")
    assert len(fast.seconds) == len(slow.seconds) == 3
    assert all(0.01 <= quick < 0.03 <= long for quick, long in zip(fast.seconds, slow.seconds, strict=True))
    assert fast.details["pid"] != slow.details["pid"]
    assert slow.details["backend"] == "none"
    assert fast.first >= 0.01 and "first" not in fast.details


def test_what_fails_is_a_row_with_the_reason_and_the_others_go_on():
    names = ["unable", "broken", "exhausted", "killed", "crashes", "exhausted_later", "exhausted_at_the_second_call"]
    rows = compare(
        [*(task(name, name) for name in names), task("good", "sleeper", seconds=0.001)],
        rounds=2, seconds=0.004, paths=HERE,
    )  # fmt: skip
    problems = {row.name: (row.problem, row.reason) for row in rows}
    assert problems["unable"] == ("cannot run", "this machine has no such units.")
    assert problems["broken"] == ("failed", "the model cannot be built")
    assert problems["exhausted"] == ("out of memory", "no room")
    assert problems["killed"][0] == "out of memory"
    assert problems["crashes"][0] == "failed" and "status 3" in problems["crashes"][1]
    assert problems["exhausted_later"][0] == "out of memory"
    assert problems["exhausted_at_the_second_call"] == ("out of memory", "CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    assert rows[5].seconds == rows[6].seconds == []
    assert problems["good"] == ("", "") and len(rows[7].seconds) == 2


def test_a_function_that_is_not_there_is_a_failed_row():
    (row,) = compare([task("typo", "slepper")], rounds=1, paths=HERE)
    assert row.problem == "failed" and "slepper" in row.reason


def test_the_peak_is_that_of_a_step_beyond_what_imports_took():
    rows = compare(
        [task("small", "holder", mebibytes=20), task("large", "holder", mebibytes=200)],
        rounds=1, seconds=0.0001, paths=HERE,
    )  # fmt: skip
    small, large = (row.peak for row in rows)
    if small is None:
        pytest.skip("this system does not tell a process's peak anew")
    assert 150 * 2**20 < large - small < 230 * 2**20
    assert small < 60 * 2**20


def test_on_a_chip_that_allows_one_process_all_live_in_it():
    first, second = compare(
        [task("a", "one_chip", number=1), task("b", "one_chip", number=2)], rounds=2, seconds=0.001, paths=HERE
    )
    assert first.details["pid"] == second.details["pid"]
    assert (first.details["number"], second.details["number"]) == (1, 2)
    assert first.peak is None and second.peak is None
    assert len(first.seconds) == len(second.seconds) == 2


def test_a_process_ends_when_it_is_closed():
    process = Process(paths=HERE)
    process.ask("load", name="a", function="workloads_for_tests:sleeper", arguments={"seconds": 0})
    process.close()
    assert process._process.returncode is not None
