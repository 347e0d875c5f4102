"""The time with flash attention: which arrays are scores, and what a step takes without their bytes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.flash_attention import Scores, kept_in_cores  # noqa: E402
from keras_mp.precision.chips import CHIPS  # noqa: E402
from keras_mp.xla.hlo import Shape, parse  # noqa: E402
from keras_mp.xla.step_time import EFFICIENCIES, step_time, transfer_seconds  # noqa: E402

SCORES = Scores(heads=8, length=4096, features=128)
TEXT = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (scores.1: f32[8,256,1024], x: bf16[4096,1024]) -> bf16[4096,1024] {
  %scores.1 = f32[8,256,1024]{2,1,0} parameter(0)
  %x = bf16[4096,1024]{1,0} parameter(1)
  %twice = f32[8,256,1024]{2,1,0} add(%scores.1, %scores.1)
  ROOT %sum = bf16[4096,1024]{1,0} add(%x, %x)
}
"""


@pytest.mark.parametrize(
    ("dimensions", "held"),
    [
        ((2, 4, 1, 256, 256), True),
        ((8, 256, 4096), True),
        ((2, 4, 256, 4096), True),  # the last block of rows, which sees all columns
        ((2, 4096, 512), False),  # activations of all heads
        ((2, 4, 4096, 128), False),
        ((4096, 4096), False),
        ((), False),
    ],
)
def test_scores_are_told_from_activations(dimensions, held):
    assert SCORES.holds(Shape("f32", dimensions)) is held


def test_activations_with_the_sizes_of_scores_are_no_scores():
    assert not Scores(8, 2048, 128).holds(Shape("f32", (8, 2048, 128)))
    assert Scores(8, 2048, 256).holds(Shape("f32", (8, 2048, 128)))


def test_a_step_takes_what_its_other_arrays_take():
    chip, efficiency = CHIPS["v6e"], EFFICIENCIES["v6e"]
    module = parse(TEXT)
    before = step_time([], module, chip)
    after = step_time([], kept_in_cores(module, SCORES), chip)
    scores, others = 2 * 8 * 256 * 1024 * 4, 2 * 4096 * 1024 * 2
    assert before.other == pytest.approx(sum(transfer_seconds(size, chip, efficiency) for size in (scores, others)))
    assert after.other == pytest.approx(sum(transfer_seconds(size, chip, efficiency) for size in (0, others)))
