"""A benchmark's workloads in processes of their own.

Each has its own backend and its own peak of memory, and one that runs out of memory takes nothing with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What lets several processes use one GPU: each takes what it needs, when it needs it.
_SHARED = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class WorkloadError(RuntimeError):
    """A workload could not be built or run."""

    def __init__(self, kind: str, reason: str):  # kind: "cannot run", "out of memory" or "failed"
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


class Process:
    """A running `keras_mp.bench.worker`, with more environment variables."""

    def __init__(self, environment: Mapping[str, str] = {}, paths: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()
        ours = [*paths, str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keras_mp.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **_SHARED, **environment, "PYTHONPATH": os.pathsep.join(ours)},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Asks a question, and waits for the answer.

        Args:
            do: the method of the worker: "load", "run" or "peak".

        Raises:
            WorkloadError: If it fails, or the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkloadError(answer["kind"], answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ended(self) -> WorkloadError:
        status = self._process.wait()
        if status == -9:
            return WorkloadError("out of memory", "the system ended its process, most often because memory ran out")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return WorkloadError(
            "failed", f"its process ended with status {status}: {lines[-1] if lines else 'no message'}"
        )
