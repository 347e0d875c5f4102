"""A training step compiles for GPUs of every compute capability in the table of chips, and keeps its precision."""

import pytest

from benchmarks.planner import chips_table
from benchmarks.planner.chips_table import PRECISIONS, STEPS, Step, has_hardware, kept, lower, row
from keras_mp.lowering import traced
from keras_mp.precision.chip import GpuDescription
from keras_mp.precision.chips import CHIPS


# H100 and B200 are tested elsewhere.
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip, capability, precision", [("rtx2080ti", "7.5", "mixed_float16"), ("rtx5090", "12.0", "fp8")]
)
def test_a_gpt_step_keeps_the_precision(chip, capability, precision):
    chip = CHIPS[chip]
    assert chip.architecture == capability
    step = Step("GPT", precision)
    run, asked = kept(step, lower(step, traced(chip)), chip)
    # In FP8 three products of each of the 4 dense layers of 2 blocks.
    assert run == asked and (asked == 24 if step.precision == "fp8" else asked > 24)


@pytest.mark.slow
def test_a_row_of_the_table(monkeypatch):
    monkeypatch.setattr(chips_table, "STEPS", [Step("digits", "mixed_float16")])
    line = row(CHIPS["rtx2080ti"])
    assert line == "| GeForce RTX 2080 Ti (`rtx2080ti`) | 7.5 |  | digits 29 of 29 |  |  |"


def test_each_precision_that_a_gpu_has_is_in_its_row():
    gpus = [chip for chip in CHIPS.values() if isinstance(chip.compiler, GpuDescription)]
    assert {chip.architecture for chip in gpus} == {"7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"}
    for chip in gpus:
        have = [precision for precision in PRECISIONS if has_hardware(chip, precision)]
        capability = float(chip.architecture)
        assert have == ["float32", "mixed_float16", *(["mixed_bfloat16"] if capability >= 8 else []),
                        *(["fp8"] if capability >= 8.9 else [])]  # fmt: skip
    assert {step.precision for step in STEPS} == set(PRECISIONS)
