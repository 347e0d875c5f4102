"""The command of ten minutes on a GPU, at sizes for a CPU: its one JSON, its tables, its limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_minutes", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_every_part_writes_its_rows_into_one_json(tmp_path):
    out = tmp_path / "gpu.json"
    run("--tiny", "--out", out)
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["products", "gpt2", "numerics", "llama", "resnet50", "predictions"]
    assert {name: part["error"] for name, part in parts.items() if part["status"] != "done"} == {}
    rows = {row["step"]: row for row in parts["products"]["rows"]}
    assert {"layer, bfloat16", "layer, current"} <= set(rows)
    assert {"bfloat16", "current", "delayed", "rowwise", "Keras float8"} <= set(rows)
    assert all(row["ms"] > 0 for row in rows.values())
    for name in ("gpt2", "llama", "resnet50"):
        steps = {row["step"]: row for row in parts[name]["rows"]}
        strict = steps["float32, strict"]
        assert strict["ms"] > 0 and strict["peak bytes"] > 0
        # The step's own products: float32 where float32 was asked for.
        assert strict["products that ran"]
        assert all(kernel.endswith("float32 x float32") for kernel in strict["products that ran"])
    numerics = parts["numerics"]["rows"]
    assert {row["check"] for row in numerics if "problem" in row} == {"fused attention"}  # cuDNN's, on a CPU
    noise = {row["case"]: row for row in numerics if row["check"] == "sqnr"}
    for recipe, forward, gradient in (("current", 28.5, 24.6), ("rowwise", 28.5, 28.5)):
        assert noise[f"{recipe}, chip"]["forward, dB"] == pytest.approx(forward, abs=1.5)
        assert noise[f"{recipe}, chip"]["input gradient, dB"] == pytest.approx(gradient, abs=1.5)
    values = {(row["check"], row["case"]): row for row in numerics}
    assert max(values["fused attention", "the kit's own, bfloat16"][of] for of in ("output", "of query")) < 0.02
    assert values["planted overflows", "8 steps, 2 planted"]["holds"]
    audited = values["audit against float16", "12 dense layers"]
    assert audited["foreseen"] == audited["seen"] == audited["in both"]
    assert values["remat gradients", "GPT, float32"]["largest difference"] < 1e-5
    predictions = {row["step"]: row for row in parts["predictions"]["rows"]}
    assert predictions["float32, strict"].get("shares") == {"float32": 1.0} or "problem" in predictions["bfloat16"]
    printed = run("--markdown", out)
    assert printed.count("\n| --- ") == 6 and "float32, strict" in printed


def test_a_part_that_overruns_is_ended_and_the_next_runs(tmp_path):
    out = tmp_path / "gpu.json"
    run("--tiny", "--out", out, "--parts", "gpt2,products", "--limit", 0.5)
    parts = json.loads(out.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["overran", "overran"]
    assert all("limit of 0.5 s" in part["error"] and part["seconds"] < 10 for part in parts.values())
