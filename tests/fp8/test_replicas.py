"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

from pathlib import Path

import keras
import pytest
from in_own_process import run

FILES = {"tensorflow": "on_two_replicas.py", "jax": "on_four_devices.py"}


@pytest.mark.jax
def test_several_replicas_equal_the_reference():
    run(Path(__file__).with_name(FILES[keras.backend.backend()]), "not slow", devices=4)
