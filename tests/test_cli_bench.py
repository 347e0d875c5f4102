"""The commands of benchmarks/, at sizes for a test: each prints its table and writes its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="this command is for JAX")
@pytest.mark.ci
def test_the_command_for_a_gpu_runs_on_a_cpu(tmp_path):
    arguments = ("--models", "gpt-small", "--rounds", 1, "--seconds", 0, "--only", "bfloat16", "--target", "h200")
    printed = run("gpu.py", *arguments, "--out", tmp_path)
    result = json.loads((tmp_path / "gpu-gpt-small.json").read_text())
    rows = {row[0]: dict(zip(result["columns"], row, strict=True)) for row in result["rows"]}
    assert list(rows)[:2] == ["float32, strict", "bfloat16"]
    assert all(float(row["step, ms"]) > 0 for row in list(rows.values())[:2])
    # The step's own products: of two operands each, and float32 where float32 was asked for.
    ran = rows["float32, strict"]["products that ran"].split("; ")
    assert sum(int(kernel.split()[0]) for kernel in ran) > 10
    assert all(kernel.endswith("float32 x float32") for kernel in ran)
    foreseen = {name: json.loads(row["predicted for h200"]) for name, row in rows.items()}
    assert foreseen["float32, strict"].get("shares") == {"float32": 1.0} or "reason" in foreseen["bfloat16"]
    assert result["command"].startswith("python benchmarks/gpu.py --models gpt-small")
    assert "time, of float32," in printed


@pytest.mark.slow
def test_the_command_for_peers(tmp_path):
    run("peers.py", "--models", "gpt-small,resnet-small,vit-small", "--rounds", 2, "--seconds", 0, "--out", tmp_path)
    for model in ("gpt-small", "resnet-small", "vit-small"):
        result = json.loads((tmp_path / f"peers-{model}.json").read_text())
        assert not result.get("note")
        assert len({row[result["columns"].index("batch")] for row in result["rows"]}) == 1
        assert (tmp_path / f"peers-{model}.svg").is_file()


@pytest.mark.slow
def test_the_command_for_the_cost_of_features(tmp_path):
    out = tmp_path / "cost.json"
    run("cost.py", "--models", "gpt-small", "--backends", keras.backend.backend(), "--rounds", 2, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 7 and all(float(row[3]) > 0 for row in rows)
    assert all(0.9 < float(row[5]) < 1.6 for row in rows if row[5])
