"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

from pathlib import Path

import pytest
from in_own_process import run


@pytest.mark.jax
def test_several_replicas_equal_the_reference():
    run(Path(__file__).with_name("scales_on_replicas.py"), "not slow", devices=4)
