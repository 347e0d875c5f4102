"""The command of benchmarks/peers.py, at sizes for a test: it prints its table and writes its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_command_for_peers(tmp_path):
    run("peers.py", "--models", "gpt-small,resnet-small,vit-small", "--rounds", 2, "--seconds", 0, "--out", tmp_path)
    for model in ("gpt-small", "resnet-small", "vit-small"):
        (path,) = tmp_path.glob(f"peers-{model}-*.json")
        result = json.loads(path.read_text())
        assert result["machine"].endswith("GFLOP/s together") or keras.backend.backend() != "tensorflow"
        assert not result.get("note")
        assert len({row[result["columns"].index("batch")] for row in result["rows"]}) == 1
        assert path.with_suffix(".svg").is_file()
