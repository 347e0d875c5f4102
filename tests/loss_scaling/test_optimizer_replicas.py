"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

from pathlib import Path

import pytest
from in_own_process import QUICK, RARE, run

FILES = ("loss_scaling/on_replicas.py", "fp8/scales_on_replicas.py")


@pytest.mark.parametrize("part", [QUICK, RARE])
def test_several_replicas_do_as_one(part):
    run([Path(__file__).parents[1] / file for file in FILES], part, devices=4)
