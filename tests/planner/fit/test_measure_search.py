"""The search for the cheapest measures, against all sets one after another."""

import math

import numpy as np
import pytest

from keras_mp.planner.fit.cheapest import Answers, Unanswered, cheapest
from keras_mp.planner.fit.measures import KINDS, MEASURES, Measures, ladders, parts, stages

NAMES = [measure.name for measure in MEASURES if not measure.divides]


def only(names):
    """Measures of these names help, and no other."""
    return lambda taken, measure: measure.name in names


class Chip:
    """A chip that answers from a formula, and writes down what it was asked."""

    def __init__(self, rng, precision, rows, possible, strategies=("",)):
        self.capacity, self.state = rng.uniform(5, 40), rng.uniform(1, 20)
        self.saved_by_states = self.state * rng.uniform(0.2, 0.5)
        self.accumulated = self.state * rng.uniform(0, 0.4)
        self.saved_by_freezing = self.state * rng.uniform(0, 0.3)
        self.fixed = sorted(rng.uniform(0, 10, 3), reverse=True)
        self.by_row = sorted(rng.uniform(0, 80, 3) * rng.choice([0.1, 1, 4]), reverse=True)
        self.ladders = [*ladders(precision, strategies, lambda strategy: rows, only(possible))]
        self.asked = []

    def pressure(self, measures):
        form = 2 if "remat" in measures.names else int("lean" in measures.names)
        share = 0.25 if measures.strategy == "fully_sharded" else 1
        saved = self.saved_by_states if "float8 states" in measures.names else 0
        saved += 0.3 * self.saved_by_states if "bfloat16 weights" in measures.names else 0
        saved += 0.2 * self.saved_by_states if "states on the host" in measures.names else 0
        saved += self.saved_by_freezing if "frozen in 16 bits" in measures.names else 0
        state = share * (self.state - saved + (self.accumulated if measures.micro_batches > 1 else 0))
        needed = self.fixed[form] + self.by_row[form] / measures.micro_batches
        return needed / (self.capacity - state) if self.capacity > state else math.inf

    def search(self):
        answers = Answers()
        while True:
            try:
                return cheapest(self.ladders, answers)
            except Unanswered as unanswered:
                self.asked.append(unanswered.measures)
                answers[unanswered.measures] = self.pressure(unanswered.measures)

    def exhaustive(self):
        every = [measures for ladder in self.ladders for stage in ladder for measures in stage]
        return next((measures for measures in every if self.pressure(measures) <= 1), None)


def test_the_cheapest_set_is_found_and_few_are_asked_for():
    rng = np.random.default_rng()
    outcomes, asked = set(), []
    for _ in range(3000):
        rows = int(rng.choice([1, 2, 6, 8, 32, 48]))
        possible = [name for name in NAMES if rng.integers(2)]
        strategies = [("",), ("data", "fully_sharded")][rng.integers(2)]
        chip = Chip(rng, "mixed_bfloat16", rows, possible, strategies)
        best = chip.search()
        assert best == chip.exhaustive()
        assert len(set(chip.asked)) == len(chip.asked)
        # A ladder has four single sets, and two stages that are bisected, each beside the two most saving sets.
        assert len(chip.asked) <= len(chip.ladders) * (6 + 2 * math.ceil(math.log2(1 + len(parts(rows)))))
        outcomes.add(best and (best.names, best.micro_batches > 1, best.strategy))
        asked.append(len(chip.asked))
    assert None in outcomes and len(outcomes) >= 20, outcomes
    assert np.mean(asked) < len(NAMES)


def test_the_order_of_cost():
    ladder = stages(Measures("float32"), 6, only(("frozen in 16 bits", "lean", "remat")))
    assert [measures.words for stage in ladder for measures in stage] == [
        "float32",
        "float32, frozen in 16 bits",
        "float32, frozen in 16 bits, lean",
        "float32, frozen in 16 bits, lean, 2 micro-batches",
        "float32, frozen in 16 bits, lean, 6 micro-batches",
        "float32, frozen in 16 bits, lean, remat",
        "float32, frozen in 16 bits, lean, remat, 2 micro-batches",
        "float32, frozen in 16 bits, lean, remat, 6 micro-batches",
    ]
    assert stages(Measures("float32"), 1, only(())) == [(Measures("float32"),)]
    assert [parts(rows) for rows in (1, 2, 3, 8, 12)] == [[], [2], [3], [2, 4, 8], [2, 4, 12]]


def test_no_set_changes_less_than_one_before_it_on_the_same_devices():
    """What computes the same comes first, then what costs time, then what trains another way: of any measures."""
    for number in range(2 ** len(NAMES)):
        possible = [name for place, name in enumerate(NAMES) if number >> place & 1]
        listed = [
            KINDS.index(measures.kind)
            for ladder in ladders("mixed_bfloat16", ("",), lambda strategy: 4, only(possible))
            for stage in ladder
            for measures in stage
        ]
        assert listed == sorted(listed)


def test_what_trains_another_way_comes_after_all_strategies():
    possible = ("lean", "remat", "float8 states", "bfloat16 weights")
    listed = ladders("mixed_bfloat16", ("data", "fully_sharded"), lambda strategy: 2, only(possible))
    words = [measures.words for ladder in listed for stage in ladder for measures in stage]
    same = 2 * 5  # of each strategy: plain, lean, in two parts, remat, remat in two parts
    assert len(words) == 3 * same and not any("states" in text for text in words[:same])
    small = [text.replace(", data", ", float8 states, data") for text in words[: same // 2]] + [
        text.replace(", fully", ", float8 states, fully") for text in words[same // 2 : same]
    ]
    assert words[same : 2 * same] == small
    assert words[2 * same :] == [text.replace("mixed_", "") for text in small]


def test_what_a_measure_includes_is_not_applied_twice():
    measures = Measures("mixed_bfloat16", tuple(NAMES), micro_batches=2)
    assert measures.policy == "bfloat16" and measures.kind == "trains another way"
    names = [measure.name for measure in measures.applied]
    assert names == ["frozen in 16 bits", "remat", "states on the host", "micro-batches"]
    small = Measures("mixed_bfloat16", ("float8 states", "bfloat16 weights"))
    assert [measure.name for measure in small.applied] == ["bfloat16 weights"]


def test_whether_a_measure_helps_is_asked_as_late_as_possible():
    """To know it the model is built: where the plain step fits, that of none which trains another way."""
    asked = []

    def helps(taken, measure):
        asked.append(measure.name)
        return True

    with pytest.raises(Unanswered):
        cheapest(ladders("mixed_bfloat16", ("",), lambda strategy: 8, helps), Answers())
    assert "float8 states" not in asked and "bfloat16 weights" not in asked


def test_where_the_state_alone_is_too_large_the_plain_step_with_small_states_is_found_first():
    """What shapes say of float32 states costs no compile: `Chip` counts those as the schedule does not."""
    chip = Chip(np.random.default_rng(), "float32", 32, ("lean", "remat", "float8 states"))
    chip.capacity, chip.state, chip.saved_by_states = 10.0, 12.0, 6.0
    chip.fixed, chip.by_row = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    assert chip.search() == Measures("float32", ("float8 states",))
    assert [measures for measures in chip.asked if chip.pressure(measures) < math.inf] == [chip.asked[-1]]


def test_a_chip_that_is_far_too_small_is_asked_for_three_sets():
    chip = Chip(np.random.default_rng(), "float32", 32, ("lean", "remat"))
    chip.pressure = lambda measures: 5.0
    assert chip.search() is None and len(chip.asked) == 3
