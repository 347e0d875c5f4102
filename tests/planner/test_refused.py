"""A step that the compiler refuses because it is too large: the message, the report, and the row of advise."""

import json

import keras
import pytest

import keras_mp
from keras_mp.lowering import Source
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.figures import pressure
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.fit.step import Question, Step
from keras_mp.planner.read.compiler_memory import Refusal, refusal_in

JAX = pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="the sizes are those of the step on JAX; on TensorFlow it fits",
)
GIB = 2**30
WIDTH = 1024
# libtpu 0.0.42, of `build` and a batch of 1,000,000 rows for a v5e.
SAID = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (17.19G) exceeds available HBM (15.75G)."
)


def build():
    """A model whose step needs 4.5 arrays of the batch's width: 2 are the batch."""
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "gelu") for _ in range(2))])
    model.compile("adam", "mse")
    return model


def batch(rows):
    return (keras.KerasTensor((rows, WIDTH)),) * 2


def test_what_the_message_says():
    refusal = refusal_in(SAID)
    assert refusal == Refusal(SAID[SAID.index("total memory") : -1], int(17.19 * GIB), int(15.75 * GIB))
    assert refusal_in("Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.").needed == 20 * GIB
    assert refusal_in("INTERNAL: it crashed") is None


@pytest.mark.jax
@JAX
@pytest.mark.slow
def test_a_step_that_the_compiler_for_tpus_refuses_is_reported():
    rows = 1_000_000
    fits = keras_mp.inspect(build(), batch(400_000), "v5e")
    report = keras_mp.inspect(build(), batch(rows), "v5e")
    memory, array = report.memory, 4 * rows * WIDTH
    state = memory.parameters + memory.optimizer
    assert not fits.refused and report.refused and not memory.fits
    assert memory.capacity < 16 * GIB
    # Beside the state, memory grows as the rows do: the message's figure holds the arguments, too.
    per_row = (fits.memory.peak - state) / 400_000
    assert memory.peak == pytest.approx(state + per_row * rows, rel=0.01)
    assert memory.temporary == pytest.approx(2.5 * array, rel=0.01) and memory.other > 2 * array
    text = " ".join(str(report).split())  # lines are broken
    assert report.refused in text and "Does not fit" in text and "none is compiled" in text
    assert "not compiled" in str(report.details("products"))
    assert {matmul.asked for matmul in report.matmuls} == {("float32", "float32")}
    assert not any(matmul.compiled for matmul in report.matmuls) and report.roofline is None
    assert report.refused in report._html()
    assert json.loads(report.to_json())["refused"] == report.refused
    for wanted in ({"low_precision_share": 0.5}, {"fits": True}):
        with pytest.raises(AssertionError):
            report.check(**wanted)


@pytest.mark.jax
@JAX
@pytest.mark.slow
def test_advise_takes_the_report_of_a_refusal():
    place = find_place("v5e")
    step, question = Step(Source(build), batch(1_000_000), place.traced), Question(place, Measures("float32"))
    report = step.compile(question, step.lower(question)).report
    there = keras_mp.inspect(build(), batch(1_000_000), "v5e")
    assert report.memory == there.memory and not report.memory.fits
    assert pressure(report.memory, report.memory.capacity) > 1
    assert report.refused == there.refused and report.time is report.roofline is None
