"""The audit's verdicts on three large models are those of each layer run in float16."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
from overflowing import gpt12, mobilenet, resnet50
from test_agreement import check_verdicts


@pytest.mark.slow
@pytest.mark.parametrize("build", [resnet50, mobilenet, gpt12])
def test_verdicts_agree_with_each_layer_run_in_float16(build):
    check_verdicts(build)
