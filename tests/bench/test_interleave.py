"""Interleaved measurements are fair."""

import pytest

from keras_mp.bench.workloads import Spread, interleave, ratio


def test_every_workload_runs_in_every_round_and_another_one_begins_each():
    order = []
    runs = {name: (lambda steps, name=name: order.append((name, steps)) or float(steps)) for name in "abc"}
    times = interleave(runs, {"a": 1, "b": 2, "c": 4}, rounds=3)
    assert [name for name, _ in order] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3, "c": [1.0] * 3}  # seconds of one step


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    load = [0.0]

    def workload(seconds):
        def run(steps):
            load[0] += 0.5  # each measurement meets a busier machine than the one before
            return steps * seconds * load[0]

        return run

    times = interleave({"fast": workload(0.010), "slow": workload(0.025)}, {"fast": 3, "slow": 1}, rounds=40)
    assert ratio(times["slow"], times["fast"]).median == pytest.approx(2.5, rel=0.02)
    assert max(times["slow"]) / min(times["slow"]) > 20


def test_a_ratio_is_taken_round_by_round():
    assert ratio([2.0, 40.0, 6.0], [1.0, 10.0, 2.0]) == Spread(2.5, 3.0, 3.5)
