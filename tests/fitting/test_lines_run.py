"""Where advise says "fits with ...", its lines run, and the model that they leave needs what the row says."""

import dataclasses
from pathlib import Path

import keras
import pytest
from in_own_process import SLOW, run
from runs_of_lines import ROWS, build, check, data, model_after

import keras_mp
from keras_mp.advice import advise as advising
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import Place, find_place
from keras_mp.advice.source import Source, lines
from keras_mp.advice.step import Step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "measures, function",
    [
        (Measures("mixed_bfloat16", lean=True, remat=True, micro_batches=4), True),
        (Measures("mixed_float16", micro_batches=4, state_dtype="float8"), False),
    ],
    ids=lambda value: getattr(value, "words", {True: "function", False: "model"}.get(value)),
)
def test_the_lines_of_sets_of_measures(measures, function):
    place, (x, y) = find_place("rtx4090"), data()
    source = Source(build) if function else Source(build(), "model")
    assert source.forms(measures.precision) == (True, True)  # a lean form, and blocks to recompute
    figures = Step(source, (x, y), place.platform).compiler(place, measures)()
    given = {"build": build} if function else {"model": build()}
    model = model_after(lines(measures, source, place, ROWS), given, x, y)
    check(figures, measures, place, model, x, y)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")
@pytest.mark.parametrize("part", [SLOW])
def test_the_lines_for_several_devices(part):
    run(Path(__file__).with_name("lines_on_devices.py"), part, devices=4)


def test_the_lines_of_a_chip_that_is_too_small_for_the_plain_step(monkeypatch):
    """A chip in whose memory the plain step does not fit: what advise finds does, and its lines make it so."""
    x, y = data()
    plain = keras_mp.advise(build, (x, y), ["rtx4090"], progress=False)["rtx4090"]
    state = plain.figures.state
    room = state + int(0.6 * (plain.figures.peak - state))

    def smaller(name):
        place = find_place(name)
        return Place(place.name, dataclasses.replace(place.chip, memory_bytes=room), place.chips)

    monkeypatch.setattr(advising, "find_place", smaller)
    report = keras_mp.advise(build, (x, y), ["rtx4090"], progress=False)
    row = report["rtx4090"]
    assert row.fits and row.measures != plain.measures and row.figures.peak <= room
    assert all(line in str(report) for line in row.code)
    assert int(model_after(row.code, {"build": build}, x, y).optimizer.iterations) == 1


def test_the_lines_of_a_chip_that_is_too_small_for_float32_states(monkeypatch):
    place = find_place("rtx4090")
    x, y = (part[:1] for part in data())  # one row cannot be divided
    room = Step(Source(build), (x, y), place.platform).state(place, Measures(place.policy)).peak - 1
    tiny = Place(place.name, dataclasses.replace(place.chip, memory_bytes=room))
    monkeypatch.setattr(advising, "find_place", lambda name: tiny)
    report = keras_mp.advise(build, (x, y), ["rtx4090"], progress=False)
    row = report["rtx4090"]
    assert row.fits and row.measures == Measures(place.policy, state_dtype="float8") and row.compiles == 1
    assert 'model = keras_mp.set_state_dtype(model, "float8")' in row.code and "float8 states" in str(report)
    model = model_after(row.code, {"build": build}, x, y)
    assert int(model.optimizer.iterations) == 1


def test_a_chip_that_is_too_small_for_all_measures(monkeypatch):
    place = find_place("rtx4090")
    x, y = (part[:1] for part in data())  # more rows would be divided, and with them the memory of the batch
    step, least = Step(Source(build), (x, y), place.platform), Measures(place.policy, state_dtype="float8")
    state = step.state(place, least).state
    tiny = Place(place.name, dataclasses.replace(place.chip, memory_bytes=state + 1024))
    monkeypatch.setattr(advising, "find_place", lambda name: tiny)
    row = keras_mp.advise(build, (x, y), ["rtx4090"], progress=False)["rtx4090"]
    assert row.fits is False and row.missing > 0 and not row.code and "Memory goes to" in row.reason
