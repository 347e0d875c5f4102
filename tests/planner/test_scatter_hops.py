"""The table of slices whose sums go in hops, against what libtpu makes of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu compiles for TPUs, where it is installed"
)
def test_hops_leave_no_sum_of_the_whole():
    command = [sys.executable, "benchmarks/scatter_hops.py", "v5e:2x4", "v5e:4x4", "v6e:4x4", "v5p:2x2x2"]
    environment = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    found = {name: (at_once, hops) for name, at_once, _, hops, *_ in rows}
    assert found.pop("v5e:2x4") == ("reduce-scatter [512]", "")
    assert set(found) == {"v5e:4x4", "v6e:4x4", "v5p:2x2x2"}
    for at_once, hops in found.values():
        assert at_once == "all-reduce [4096]"
        assert hops.count("reduce-scatter") in (2, 3) and "all-reduce" not in hops
