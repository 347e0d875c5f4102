"""200 steps on several devices and in several processes beside one device; fewer steps are in tests/parallel."""

import sys
from pathlib import Path

import pytest
from in_own_process import run

PARALLEL = Path(__file__).parents[1] / "parallel"
sys.path.append(str(PARALLEL))
import test_workers as processes

pytestmark = [pytest.mark.slow, pytest.mark.jax, pytest.mark.timeout(3600)]


def test_on_several_devices():
    run(Path(__file__).with_name("steps_on_devices.py"), "slow", devices=8)


def test_two_processes_train_as_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LIMIT", 1200)
    runs = ["float32", "mixed_bfloat16", "mixed_float16:0:17", "mixed_float16:1:17"]
    processes.check_two_processes(runs, [*runs, "--gpt", "--epochs", "40"], tmp_path)
