"""Starts the tests of several replicas, which must configure their devices before anything else has used them."""

import os
import subprocess
import sys
from pathlib import Path


def test_several_replicas_do_as_one():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    file = Path(__file__).with_name("on_replicas.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=file.parents[2])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
