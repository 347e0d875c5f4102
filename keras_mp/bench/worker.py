"""The process that builds and runs a benchmark's workloads.

    python -m keras_mp.bench.worker

Questions and answers are lines of JSON, on standard input and on what was standard output; what libraries print goes
to standard error.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import sys
import traceback
from typing import Any

from keras_mp.bench.workloads import CannotRunError, Workload
from keras_mp.system.host import forget_peak, peak_process_bytes, resident_bytes


class _Worker:
    """Answers the questions, each by the method of its name."""

    def __init__(self) -> None:
        self.workloads: dict[str, Workload] = {}
        self.before: dict[str, int] = {}

    def load(self, name: str, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Builds a workload and runs its first, compiling, step."""
        build = pkgutil.resolve_name(function)
        self.before[name] = resident_bytes() or 0
        workload = self.workloads[name] = build(**arguments)
        first = workload.run(1)
        return {"first": first, **workload.details}

    def run(self, name: str, steps: int) -> float:
        """Runs some steps, and returns their seconds."""
        return self.workloads[name].run(steps)

    def peak(self, name: str) -> int | None:
        """Runs a step; returns peak memory, on CPUs beyond imports."""
        workload = self.workloads[name]
        if workload.peak is not None:
            return workload.peak()
        if not forget_peak():
            return None
        workload.run(1)
        most = peak_process_bytes()
        return None if most is None else most - self.before[name]


def main() -> None:
    """Answers until there are no more questions."""
    # What was standard output is for answers alone; libraries print to the other one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"answer": getattr(worker, question.pop("do"))(**question)}
        except Exception as error:
            traceback.print_exc()
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            answer = {"error": lines[0][:300], "kind": _kind(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _kind(error: Exception) -> str:
    if isinstance(error, CannotRunError):
        return "cannot run"
    text = f"{type(error).__name__}: {error}"
    said = re.search("resource_?exhausted|out_?of_?memory|out of memory|bad_alloc", text, re.IGNORECASE)
    return "out of memory" if said or isinstance(error, MemoryError) else "failed"


if __name__ == "__main__":
    main()
