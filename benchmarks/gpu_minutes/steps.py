"""Whole training steps of a model in every precision: time, peak memory, the products that ran; and PyTorch's.

One after another, each in a process of its own that has the device's whole memory: six steps of a Llama of 1 B do not
fit into it together. The products are read from the module that the compiler wrote down for the step that ran.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peer_workloads import WORKLOADS

from benchmarks.gpu_minutes.process import ROOT, emit
from benchmarks.gpu_minutes.products import counted
from keras_mp.bench.workloads import Task, compare

PATHS = [str(ROOT / "benchmarks"), str(ROOT)]

# One of each kind of row: a step, one that a CPU refuses, one with an environment of its own, and a peer.
REHEARSED = ("bfloat16", "FP8, current", "float32, strict", "PyTorch, bfloat16")


def main(tiny: bool, workload: str) -> None:
    """Measures the steps of a model, in the order of worth."""
    for task in tasks(workload):
        if tiny and task.name not in REHEARSED:
            continue
        with tempfile.TemporaryDirectory() as folder:
            emit(measured(task, Path(folder), rounds=2 if tiny else 8, seconds=0.0 if tiny else 0.5))


def tasks(workload: str) -> list[Task]:
    """The kit's precisions, and PyTorch compiled where it is installed, in the order of worth."""
    kit = {
        "bfloat16": ({"precision": "mixed_bfloat16"}, {}),
        "FP8, current": ({"precision": "fp8", "fp8": "current"}, {}),
        "float32, TF32": ({"precision": "float32"}, {"JAX_DEFAULT_MATMUL_PRECISION": "default"}),
        "float16": ({"precision": "mixed_float16"}, {}),
        "FP8, delayed": ({"precision": "fp8", "fp8": "delayed"}, {}),
        "float32, strict": ({"precision": "float32"}, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}),
    }
    peers = {"bfloat16": "mixed_bfloat16", "float32, TF32": "float32", "float16": "mixed_float16"}
    if not importlib.util.find_spec("torch"):
        peers = {}
    made = []
    for name, (arguments, environment) in kit.items():
        # A ResNet's one dense layer is too small for FP8.
        if WORKLOADS[workload].kind != "resnet" or "fp8" not in arguments:
            own = {"KERAS_BACKEND": "jax", **environment}
            made.append(Task(name, "peer_keras:kit", {"workload": workload, **arguments}, own))
        if name in peers:
            compiled = {"workload": workload, "precision": peers[name], "compile": True}
            made.append(Task(f"PyTorch, {name}", "peer_pytorch:step", compiled))
    return made


def measured(task: Task, folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a task; one that fails says why."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
    task = task._replace(environment={**task.environment, "XLA_FLAGS": flags})
    row = compare([task], rounds=rounds, seconds=seconds, paths=PATHS)[0]
    if row.problem:
        return {"step": task.name, "problem": f"{row.problem}: {row.reason}"}
    kind = row.details["kind"]
    return {
        "step": task.name,
        "ms": 1e3 * statistics.median(row.seconds),
        "peak bytes": row.peak,
        "first step, s": row.first,
        "units": row.details["units"],
        "unit": row.details["unit"],
        "device": row.details["device"],
        "products that ran": kernels(folder, "cuda" if kind == "gpu" else kind),
    }


def kernels(folder: Path, platform: str) -> dict[str, int]:
    """The products of the largest module that XLA wrote into the folder, which is the step's."""
    paths = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    return counted(paths[-1].read_text(), platform) if paths else {}
