"""A training step compiles for GPUs of every compute capability in the table of chips, and keeps its precision."""

import pytest
from marks import at_least

from benchmarks.chips_table import PRECISIONS, STEPS, Step, has_hardware, kept, lower, row
from keras_mp.precision.chip import GpuDescription
from keras_mp.precision.chips import CHIPS

pytestmark = [pytest.mark.ci, pytest.mark.once]

# The GPU of each compute capability that the table of chips did not have for long; A100, L4, H100 and B200 are tested
# elsewhere.
FIRST = {"7.5": "rtx2080ti", "8.6": "rtx3090", "8.9": "rtx4090", "10.3": "b300", "12.0": "rtx5090"}
PRECISION = {"7.5": "mixed_float16", "8.6": "mixed_bfloat16", "8.9": "fp8", "10.3": "fp8", "12.0": "fp8"}


@pytest.mark.parametrize("capability", at_least(FIRST, "7.5", "10.3", "12.0"))
def test_a_gpt_step_keeps_the_precision(capability):
    chip = CHIPS[FIRST[capability]]
    assert chip.architecture == capability
    step = Step("GPT", PRECISION[capability])
    run, asked = kept(step, lower(step), chip)
    # In FP8 three products of each of the 4 dense layers of 2 blocks.
    assert run == asked and (asked == 24 if step.precision == "fp8" else asked > 24)


def test_a_row_of_the_table():
    step = Step("digits", "mixed_float16")
    line = row(CHIPS["rtx2080ti"], {step: lower(step)})
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
