"""Starts the tests of quantized models on several devices, in a process of their own."""

from pathlib import Path

import pytest
from in_own_process import run

pytest.importorskip("keras", "3.14", reason="Keras packs int4 in groups from 3.14")


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_quantized_models_on_several_devices_do_as_on_one():
    run(Path(__file__).with_name("quantized_on_devices.py"), "not slow", devices=4)
