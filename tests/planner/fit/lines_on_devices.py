"""The lines of advice for several devices; `test_lines_run.py` starts this file with virtual devices."""

import pytest
from runs_of_lines import ROWS, build, check, data, model_after

from keras_mp.lowering import Source
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.measures import Measures, lines
from keras_mp.planner.fit.step import Question, Step

pytestmark = pytest.mark.slow


def test_the_lines_for_four_devices():
    strategy = "fully_sharded"
    place, (x, y) = find_place("rtx4090x4"), data()
    source, measures = Source(build), Measures("float32", strategy=strategy)
    step, question = Step(source, (x, y), place.traced), Question(place, measures)
    report = step.compile(question, step.lower(question)).report
    code = lines(measures, source, place.devices, ROWS)
    assert f'with keras_mp.parallel.distribute("{strategy}", devices=4):' in code
    check(report, measures, place, model_after(code, {"build": build}, x, y), x, y)
