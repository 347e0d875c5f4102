"""The search for the cheapest measures, against all sets one after another."""

import math

import numpy as np

from keras_mp.advice.cheapest import search
from keras_mp.advice.measures import Measures, Possible, ladders, parts, stages


class Chip:
    """A chip that answers from a formula, and writes down what it was asked."""

    def __init__(self, rng, possible, strategies):
        self.capacity, self.state = rng.uniform(5, 40), rng.uniform(1, 20)
        self.saved_by_states = self.state * rng.uniform(0.2, 0.5)
        self.accumulated = self.state * rng.uniform(0, 0.4)
        self.fixed = sorted(rng.uniform(0, 10, 3), reverse=True)
        self.by_row = sorted(rng.uniform(0, 80, 3) * rng.choice([0.1, 1, 4]), reverse=True)
        self.ladders = ladders(possible, strategies)
        self.asked = []

    def pressure(self, measures):
        form = 2 if measures.remat else int(measures.lean)
        share = 0.25 if measures.strategy == "fully_sharded" else 1
        saved = self.saved_by_states if measures.state_dtype else 0
        state = share * (self.state - saved + (self.accumulated if measures.micro_batches > 1 else 0))
        needed = self.fixed[form] + self.by_row[form] / measures.micro_batches
        return needed / (self.capacity - state) if self.capacity > state else math.inf

    def search(self):
        probe = search(self.ladders)
        try:
            measures = next(probe)
            while True:
                self.asked.append(measures)
                measures = probe.send(self.pressure(measures))
        except StopIteration as ended:
            return ended.value

    def exhaustive(self):
        every = [measures for ladder in self.ladders for stage in ladder for measures in stage]
        return next((measures for measures in every if self.pressure(measures) <= 1), None)


def test_the_cheapest_set_is_found_and_few_are_asked_for():
    rng = np.random.default_rng()
    outcomes, asked = set(), []
    for _ in range(3000):
        rows = int(rng.choice([1, 2, 6, 8, 32, 48]))
        possible = Possible("mixed_bfloat16", rows, *(bool(rng.integers(2)) for _ in range(3)))
        strategies = [("",), ("data", "fully_sharded")][rng.integers(2)]
        chip = Chip(rng, possible, strategies)
        best = chip.search()
        assert best == chip.exhaustive()
        assert len(set(chip.asked)) == len(chip.asked)
        # A ladder has three single sets, and two stages that are bisected, each beside the two most saving sets.
        assert len(chip.asked) <= len(chip.ladders) * (5 + 2 * math.ceil(math.log2(1 + len(parts(rows)))))
        outcomes.add(best and (best.lean, best.remat, best.micro_batches > 1, best.strategy, best.state_dtype))
        asked.append(len(chip.asked))
    assert None in outcomes and len(outcomes) >= 20, outcomes
    assert np.mean(asked) < 6


def test_the_order_of_cost():
    ladder = stages(Possible("float32", 6, lean=True, remat=True))
    assert [measures.words for stage in ladder for measures in stage] == [
        "float32",
        "float32, lean",
        "float32, lean, 2 micro-batches",
        "float32, lean, 6 micro-batches",
        "float32, lean, remat",
        "float32, lean, remat, 2 micro-batches",
        "float32, lean, remat, 6 micro-batches",
    ]
    assert stages(Possible("float32", 1, lean=False, remat=False)) == [(Measures("float32"),)]
    assert [parts(rows) for rows in (1, 2, 3, 8, 12)] == [[], [2], [3], [2, 4, 8], [2, 4, 12]]


def test_states_in_8_bits_come_after_all_that_computes_the_same():
    possible = Possible("mixed_bfloat16", 2, lean=True, remat=True, states=True)
    listed = ladders(possible, ("data", "fully_sharded"))
    words = [measures.words for ladder in listed for stage in ladder for measures in stage]
    same = 2 * 5  # of each strategy: plain, lean, in two parts, remat, remat in two parts
    assert len(words) == 2 * same and not any("states" in text for text in words[:same])
    assert words[same:] == [text.replace(", data", ", float8 states, data") for text in words[: same // 2]] + [
        text.replace(", fully", ", float8 states, fully") for text in words[same // 2 : same]
    ]
    assert ladders(Possible("float32", 2, True, True), ("",)) == [stages(Possible("float32", 2, True, True))]


def test_where_the_state_alone_is_too_large_the_plain_step_with_small_states_is_found_first():
    """What shapes say of float32 states costs no compile: `Chip` counts those as the schedule does not."""
    chip = Chip(np.random.default_rng(), Possible("float32", 32, lean=True, remat=True, states=True), ("",))
    chip.capacity, chip.state, chip.saved_by_states = 10.0, 12.0, 6.0
    chip.fixed, chip.by_row = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    assert chip.search() == Measures("float32", state_dtype="float8")
    assert [measures for measures in chip.asked if chip.pressure(measures) < math.inf] == [chip.asked[-1]]


def test_a_chip_that_is_far_too_small_is_asked_for_three_sets():
    chip = Chip(np.random.default_rng(), Possible("float32", 32, lean=True, remat=True), ("",))
    chip.pressure = lambda measures: 5.0
    assert chip.search() is None and len(chip.asked) == 3
