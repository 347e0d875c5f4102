"""Runs one part in a process of its own, and ends it with all its children when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_minutes.record import Record

# What a line of a part's output begins with when it is a row.
ROW = "@row "
ROOT = Path(__file__).resolve().parents[2]


def emit(row: dict[str, Any]) -> None:
    """Hands a row to the command; called within a part."""
    print(ROW + json.dumps(row), flush=True)


def run_part(record: Record, name: str, module: str, limit: float, tiny: bool, arguments: Sequence[str] = ()) -> None:
    """Runs a part, adds its rows to the record as they come, and notes how it ended.

    Args:
        record: the JSON.
        name: the name of the part.
        module: the module, which has `main(tiny, *arguments)`.
        limit: the seconds that it may take.
        tiny: sizes for a CPU.
        arguments: the arguments of its `main`.
    """
    entry = record.begin(name, limit)
    started = time.monotonic()
    code = f"import {module} as part; part.main({tiny}, *{list(arguments)})"
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # PyTorch runs beside JAX
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        overran = threading.Event()
        timer = threading.Timer(limit, _end, (process, overran))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(ROW):
                    entry["rows"].append(json.loads(line[len(ROW) :]))
                    record.save()
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
        errors.seek(0)
        last = errors.read().strip().splitlines()[-3:]
    entry["seconds"] = round(time.monotonic() - started, 1)
    if overran.is_set():
        entry.update(status="overran", error=f"ended after its limit of {limit:g} s")
    elif status:
        entry.update(status="failed", error=" / ".join(last) or f"exit status {status}")
    else:
        entry["status"] = "done"
    record.save()


def _end(process: subprocess.Popen[str], overran: threading.Event | None = None) -> None:
    if overran is not None:
        overran.set()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of its group have ended
