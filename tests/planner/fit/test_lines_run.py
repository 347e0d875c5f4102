"""Where advise says "fits in ..., with ...", its lines run, and the model that they leave needs what the row says."""

import dataclasses
from pathlib import Path

import keras
import pytest
from in_own_process import SLOW, run
from runs_of_lines import ROWS, build, check, data, model_after

import keras_mp
from keras_mp.lowering import Source
from keras_mp.planner import advise as advising
from keras_mp.planner.chips.place import Place, find_place
from keras_mp.planner.fit.figures import state_of
from keras_mp.planner.fit.measures import MEASURES, Measures, lines
from keras_mp.planner.fit.step import Question, Step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "measures, function",
    [
        (Measures("mixed_bfloat16", ("lean", "remat"), micro_batches=4), True),
        (Measures("mixed_float16", ("float8 states",), micro_batches=4), False),
    ],
    ids=lambda value: getattr(value, "words", {True: "function", False: "model"}.get(value)),
)
def test_the_lines_of_sets_of_measures(measures, function):
    place, (x, y) = find_place("rtx4090"), data()
    source = Source(build) if function else Source(build(), "model")
    step = Step(source, (x, y), place.traced)
    assert all(step.helps(Measures(place.policy), one) for one in MEASURES if one.name in ("lean", "remat"))
    report = step.compile(Question(place, measures), step.lower(Question(place, measures))).report
    given = {"build": build} if function else {"model": build()}
    model = model_after(lines(measures, source, 1, ROWS), given, x, y)
    check(report, measures, place, model, x, y)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")
@pytest.mark.parametrize("part", [SLOW])
def test_the_lines_for_several_devices(part):
    run(Path(__file__).with_name("lines_on_devices.py"), part, devices=4)


def test_the_lines_of_a_chip_that_is_too_small_for_the_plain_step(monkeypatch):
    """A chip in whose memory the plain step does not fit: what advise finds does, and its lines make it so."""
    x, y = data()
    plain = keras_mp.advise(build, (x, y), ["rtx4090"], verbose=False)["rtx4090"]
    state = state_of(plain.memory)
    room = state + int(0.6 * (plain.memory.peak - state))

    def smaller(name, strategy):
        place = find_place(name, strategy)
        return Place(place.name, dataclasses.replace(place.chip, memory_bytes=room), place.chips)

    monkeypatch.setattr(advising, "find_place", smaller)
    report = keras_mp.advise(build, (x, y), ["rtx4090"], verbose=False)
    row = report["rtx4090"]
    assert row.fits and row.measures != plain.measures and row.memory.peak <= room
    assert all(line in str(report) for line in row.code)
    assert int(model_after(row.code, {"build": build}, x, y).optimizer.iterations) == 1


def test_the_lines_of_a_chip_that_is_too_small_for_float32_states(monkeypatch):
    place = find_place("rtx4090")
    x, y = (part[:1] for part in data())  # one row cannot be divided
    room = Step(Source(build), (x, y), place.traced).state(place, Measures(place.policy)).peak - 1
    tiny = Place(place.name, dataclasses.replace(place.chip, memory_bytes=room))
    monkeypatch.setattr(advising, "find_place", lambda name, strategy: tiny)
    report = keras_mp.advise(build, (x, y), ["rtx4090"], verbose=False)
    row = report["rtx4090"]
    assert row.fits and row.measures == Measures(place.policy, ("float8 states",)) and row.compiles == 1
    assert (
        'model = keras_mp.loss_scaling.change_optimizer(model, state_dtype="float8")' in row.code
        and "float8 states" in str(report)
    )
    model = model_after(row.code, {"build": build}, x, y)
    assert int(model.optimizer.iterations) == 1


def test_a_chip_that_is_too_small_for_all_measures(monkeypatch):
    place = find_place("rtx4090")
    x, y = (part[:1] for part in data())  # more rows would be divided, and with them the memory of the batch
    step = Step(Source(build), (x, y), place.traced)
    least = Measures(place.policy, ("float8 states", "bfloat16 weights"))
    state = step.state(place, least).peak
    tiny = Place(place.name, dataclasses.replace(place.chip, memory_bytes=state + 1024))
    monkeypatch.setattr(advising, "find_place", lambda name, strategy: tiny)
    row = keras_mp.advise(build, (x, y), ["rtx4090"], verbose=False)["rtx4090"]
    assert row.fits is False and row.missing > 0 and not row.code and "Memory goes to" in row.reason
