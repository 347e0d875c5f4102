"""Runs a test file in a process of its own, for tests that must configure devices before anything has used them.

Such a file is not called test_*.py; a test beside it starts it, once for each of the parts QUICK and SLOW, and RARE
where it has such tests. The marks of a test in the file say which part it is in, as everywhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = pytest.param("not slow", id="quick", marks=pytest.mark.jax)
SLOW = pytest.param("slow and not rare", id="slow", marks=[pytest.mark.slow, pytest.mark.jax, pytest.mark.timeout(900)])
RARE = pytest.param("rare", id="rare", marks=[pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(900)])


def run(files: Path | list[Path], part: str, devices: int) -> None:
    """Runs the tests of files in one process that the marks `part` select, on so many devices where JAX makes them."""
    # XLA has a thread for each device. All wait for each other in a sum, and one may wait for a thread to compute in:
    # NPROC is how many threads it makes at least.
    flags = os.environ.get("XLA_FLAGS", "")
    if part != "not slow":  # which compare values in units of the last place
        flags = flags.replace("optimization_level=0", "optimization_level=1")
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "NPROC": str(4 * devices),
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", part]
    command += map(str, files if isinstance(files, list) else [files])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout[-8000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
