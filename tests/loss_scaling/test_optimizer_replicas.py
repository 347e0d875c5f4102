"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

from pathlib import Path

import pytest
from in_own_process import QUICK, RARE, run


@pytest.mark.parametrize("part", [QUICK, RARE])
def test_several_replicas_do_as_one(part):
    run(Path(__file__).with_name("on_replicas.py"), part, devices=4)
