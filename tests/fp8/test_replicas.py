"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

import os
import subprocess
import sys
from pathlib import Path

import keras

FILES = {"tensorflow": "on_two_replicas.py", "jax": "on_four_devices.py"}


def test_several_replicas_equal_the_reference():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    file = Path(__file__).parent / FILES[keras.backend.backend()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=file.parents[2])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
