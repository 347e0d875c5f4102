"""The command of ten minutes on a GPU, at sizes for a CPU: its limit; `tests/long` has its parts and its tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_minutes", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_a_part_that_overruns_is_ended_and_the_next_runs(tmp_path):
    out = tmp_path / "gpu.json"
    run("--tiny", "--out", out, "--parts", "gpt2,products", "--limit", 0.5)
    parts = json.loads(out.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["overran", "overran"]
    assert all("limit of 0.5 s" in part["error"] and part["seconds"] < 10 for part in parts.values())
