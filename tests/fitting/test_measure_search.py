"""The search for the cheapest measures, against all sets one after another."""

import math

import numpy as np
import pytest

from keras_mp.advice.cheapest import search
from keras_mp.advice.measures import Measures, Possible, parts, stages

pytestmark = pytest.mark.once


class Chip:
    """A chip that answers from a formula, and writes down what it was asked."""

    def __init__(self, rng, possible, strategies):
        self.capacity, self.state = rng.uniform(5, 40), rng.uniform(1, 20)
        self.accumulated = self.state * rng.uniform(0, 0.4)
        self.fixed = sorted(rng.uniform(0, 10, 3), reverse=True)
        self.by_row = sorted(rng.uniform(0, 80, 3) * rng.choice([0.1, 1, 4]), reverse=True)
        self.ladders = [stages(possible, strategy) for strategy in strategies]
        self.asked = []

    def pressure(self, measures):
        form = 2 if measures.remat else int(measures.lean)
        share = 0.25 if measures.strategy == "fully_sharded" else 1
        state = share * (self.state + (self.accumulated if measures.micro_batches > 1 else 0))
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
        possible = Possible("mixed_bfloat16", rows, bool(rng.integers(2)), bool(rng.integers(2)))
        strategies = [("",), ("data", "fully_sharded")][rng.integers(2)]
        chip = Chip(rng, possible, strategies)
        best = chip.search()
        assert best == chip.exhaustive()
        assert len(set(chip.asked)) == len(chip.asked)
        # A ladder has three single sets, and two stages that are bisected, each beside the two most saving sets.
        assert len(chip.asked) <= len(strategies) * (5 + 2 * math.ceil(math.log2(1 + len(parts(rows)))))
        outcomes.add(best and (best.lean, best.remat, best.micro_batches > 1, best.strategy))
        asked.append(len(chip.asked))
    assert None in outcomes and len(outcomes) >= 12, outcomes
    assert np.mean(asked) < 5


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


def test_a_chip_that_is_far_too_small_is_asked_for_three_sets():
    chip = Chip(np.random.default_rng(), Possible("float32", 32, lean=True, remat=True), ("",))
    chip.pressure = lambda measures: 5.0
    assert chip.search() is None and len(chip.asked) == 3
