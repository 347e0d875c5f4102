"""Whole training steps on this GPU in every precision, beside what `inspect` predicted, and the kernels that ran.

    KERAS_BACKEND=jax python benchmarks/gpu.py --out docs/results        # an H100 or H200; half an hour
    KERAS_BACKEND=jax python benchmarks/gpu.py --models gpt-small --rounds 2 --target none     # tries it out on a CPU

For a GPT-2 124M (batch 8 x 1024), a GPT of 2 layers of width 4096 (batch 8 x 2048) and ResNet-50 (batch 128): strict
float32, TensorFloat-32, bfloat16, float16, FP8 with current and with delayed scaling; and PyTorch, compiled, where it
is installed. Autotuning is on. Steps are interleaved; memory is the device's peak. The products are read from the
module that the compiler wrote down while it compiled the step that ran: which kernel, operands of which dtype, how
many. The prediction is the compiler's, made without the GPU.

Aimed at on an H200: bfloat16 at least 2.5 times as fast as strict float32; FP8 at least 1.3 times as fast as bfloat16
at width 4096.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# What this process itself imports; it computes nothing.
os.environ.setdefault("KERAS_BACKEND", "jax")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import write
from rich.console import Console

from keras_mp.bench.benchmark_report import BenchmarkReport
from keras_mp.bench.compare import Task, answer, compare, device_of
from keras_mp.bench.process import WorkloadError
from keras_mp.xla.hlo import parse
from keras_mp.xla.matmuls import products

MODELS = ("gpt2-124m", "gpt-4096", "resnet50")
BASE = "float32, strict"


def tasks(workload: str, dump: Path) -> list[Task]:
    """All precisions of a model; those of FP8 where it has dense layers enough."""
    variants = {
        BASE: ("float32", {}, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}),
        "float32, TF32": ("float32", {}, {"JAX_DEFAULT_MATMUL_PRECISION": "default"}),
        "bfloat16": ("mixed_bfloat16", {}, {}),
        "float16": ("mixed_float16", {}, {}),
    }
    if not workload.startswith("resnet"):
        variants["FP8, current"] = ("fp8", {"fp8": "current"}, {})
        variants["FP8, delayed"] = ("fp8", {"fp8": "delayed"}, {})
    tasks_of_model = []
    for name, (precision, options, environment) in variants.items():
        folder = dump / workload / name.replace(", ", "-")
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        environment = environment | {
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        }
        arguments = {"workload": workload, "precision": precision, **options}
        tasks_of_model.append(Task(name, "peer_keras:kit", arguments, environment))
    if importlib.util.find_spec("torch"):
        for name, precision in (
            ("PyTorch, strict float32", "strict float32"),
            ("PyTorch, TF32", "float32"),
            ("PyTorch, bfloat16", "mixed_bfloat16"),
            ("PyTorch, float16", "mixed_float16"),
        ):
            arguments = {"workload": workload, "precision": precision, "compile": True}
            tasks_of_model.append(Task(name, "peer_pytorch:step", arguments))
    return tasks_of_model


def kernels(folder: Path, platform: str) -> dict[str, int]:
    """The products of the step that ran: how many of each kernel, with the dtypes of its operands.

    Args:
        folder: where XLA wrote its modules; the largest is that of the step.
        platform: "cuda" or "cpu".
    """
    paths = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    if not paths:
        return {}
    counts = Counter(
        f"{made.kernel}: {' x '.join(made.operands)}" for made in products(parse(paths[-1].read_text()), platform)
    )
    return dict(counts.most_common())


def predicted(workload: str, precision: str, target: str, fp8: str = "current") -> dict[str, Any]:
    """What `inspect` says of the step, in a process of its own."""
    import keras
    from peer_keras import kit_compiled
    from peer_workloads import WORKLOADS, batch_of

    import keras_mp

    batch = tuple(keras.KerasTensor(array.shape, array.dtype.name) for array in batch_of(WORKLOADS[workload]))
    model = kit_compiled(workload, precision, fp8)
    report = keras_mp.inspect(model, batch, target)
    estimate = report.roofline
    return {
        "seconds_at_best": estimate.seconds if estimate else None,
        "bound": estimate.bound if estimate else None,
        "temporary_bytes": report.memory.temporary,
        "shares": report.shares,
    }


def predictions(wanted: list[Task], target: str) -> dict[str, dict[str, Any]]:
    """The predictions for the kit's rows; one that cannot be made says why."""
    foreseen = {}
    for task in wanted:
        if task.function != "peer_keras:kit":
            continue
        arguments = {**task.arguments, "target": target}
        environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        once = Task(task.name, "gpu:predicted", arguments, environment)
        try:
            foreseen[task.name] = answer(once, [str(HERE), str(HERE.parent)])
        except WorkloadError as error:
            foreseen[task.name] = {"problem": error.kind, "reason": error.reason}
    return foreseen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each in a round")
    parser.add_argument("--only", default="", help="rows whose names hold this, beside strict float32")
    parser.add_argument("--target", default="h200", help="the chip of the prediction; none for no prediction")
    parser.add_argument("--out", type=Path, help="a folder for gpu-<model>.json")
    options = parser.parse_args()
    for workload in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            wanted = [task for task in tasks(workload, Path(folder)) if options.only in task.name or task.name == BASE]
            rows = compare(
                wanted,
                rounds=options.rounds,
                seconds=options.seconds,
                paths=[str(HERE), *filter(None, sys.path)],
                log=lambda text: print(text, file=sys.stderr),
            )
            kind = next((row.details["kind"] for row in rows if row.details), "cpu")
            platform = "cuda" if kind == "gpu" else kind
            ran = {row.name: kernels(Path(folder) / workload / row.name.replace(", ", "-"), platform) for row in rows}
        device = device_of(rows)
        report = BenchmarkReport(f"{workload} on {device}", BASE, rows)
        Console().print(report)
        foreseen = predictions(wanted, options.target) if options.target != "none" else {}
        for name, counts in ran.items():
            print(f"{name}: " + ("; ".join(f"{count} {kernel}" for kernel, count in counts.items()) or "no module"))
        for name, prediction in foreseen.items():
            print(f"predicted for {options.target}, {name}: {json.dumps(prediction)}")
        if options.out:
            columns, cells = report.table()
            columns += ["products that ran", f"predicted for {options.target}"]
            for row, row_cells in zip(rows, cells, strict=True):
                counts = "; ".join(f"{count} {kernel}" for kernel, count in ran[row.name].items())
                row_cells += [counts, json.dumps(foreseen.get(row.name, {}))]
            command = "python benchmarks/gpu.py " + " ".join(sys.argv[1:])
            note = " ".join([f"On {device}.", *report.problems])
            write(options.out / f"gpu-{workload}.json", report.title, command, columns, cells, report.versions, note)


if __name__ == "__main__":
    main()
