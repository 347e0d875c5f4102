"""Every task of KerasHub through the kit: stabilize, fit, find_nonfinite, audit, export_float32, convert, save.

    python benchmarks/task_sweep.py [--only NAME ...] [--markdown docs/tables/kerashub-tasks.md]

Tasks are built under mixed_float16 without pretrained weights, at tiny sizes. Where a step of the kit fails, plain
Keras is run on a fresh task, and what it fails at is shown; a step that fails where plain Keras works is a fault. Each
task has a process of its own, and a time limit. Rows are kept in build/kerashub-tasks: a call without --only makes
those that are missing, or were made by another state of the sources; --only makes those that it names anew.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the repository, and causal_models
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.simplefilter("ignore")  # of the tasks' own, about masks and overflows in float16

import keras
import keras_hub
import tensorflow as tf
from rich.console import Console

from benchmarks.kerashub_tasks import OUTSIDE, TASKS
from benchmarks.kerashub_tasks.plain import Failure
from benchmarks.kerashub_tasks.steps import STEPS, row
from keras_mp.system.atomic_write import write_text

CONFIGURED = ROOT / "benchmarks/kerashub_tasks"
RESULTS = ROOT / "build/kerashub-tasks"
LIMIT = 600  # seconds for a task
PRELOADED = ["tensorflow", "keras_hub.models"]  # imported once, before the process of each task is forked


def state(name: str) -> str:
    """A digest of the sources that a row depends on: the kit's, the steps', and those that configure the task."""
    kit = sorted((ROOT / "keras_mp").rglob("*.py"))
    configured = Path(sys.modules[TASKS[name].build.__module__].__file__)
    models = ROOT / "tests/causal_models.py"
    return _digest([*kit, CONFIGURED / "task.py", CONFIGURED / "steps.py", configured, models])


def state_of_plain() -> str:
    """A digest of what plain Keras is given to do, which a row in which all works does not depend on."""
    return _digest([CONFIGURED / "plain.py"])


def _digest(sources: list[Path]) -> str:
    digest = hashlib.sha256(f"{keras.__version__} {keras_hub.__version__} {tf.__version__}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def is_current(made: dict[str, Any], made_by: str) -> bool:
    """Whether a row holds all steps, and is of this state of its sources."""
    works = all(cell["status"] == "works" for cell in made["cells"].values())
    whole = set(made["cells"]) == set(STEPS) and not made.get("running")
    return whole and made["state"] == made_by and (works or made["plain"] == state_of_plain())


def write_row(name: str, path: Path, made_by: str) -> None:
    """Makes a row in this process; the file holds the steps that are done, should the process end before its time."""
    tf.get_logger().setLevel("ERROR")

    def done(made: dict[str, Any]) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"name": name, "state": made_by, "plain": state_of_plain(), **made}, indent=1))
        partial.rename(path)

    row(TASKS[name], done)


def row_in_own_process(name: str, path: Path, made_by: str, limit: float) -> dict[str, Any]:
    """Makes a row in a process that ends with it, or at the limit."""
    path.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=write_row, args=(name, path, made_by))
    process.start()
    try:
        process.join(limit)
        reason = f"not done within {limit:g} s" if process.is_alive() else f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    nothing = {"name": name, "state": made_by, "plain": state_of_plain(), "family": TASKS[name].family, "cells": {}}
    made = json.loads(path.read_text()) if path.exists() else nothing
    if made.get("running", True):
        step = made.get("running") or "build"
        made["cells"][step] = {"status": "fault", "error": reason, "note": "", "plain": None, "warning": ""}
        path.write_text(json.dumps(made, indent=1))
    return made


def faults(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{made['name']}, {step}: {cell['error']}"
        for made in rows
        for step, cell in made["cells"].items()
        if cell["status"] == "fault"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names, or parts of names; their rows are made anew")
    parser.add_argument("--markdown", type=Path, help="write the table of all rows to this file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that the rows are kept in")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a task")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a task ends, too
    arguments.results.mkdir(parents=True, exist_ok=True)
    console = Console(width=160)
    states = {name: state(name) for name in TASKS}
    kept = {path.stem: json.loads(path.read_text()) for path in arguments.results.glob("*.json")}
    for name in TASKS:
        wanted = any(part in name for part in arguments.only) if arguments.only else True
        known = name in kept and is_current(kept[name], states[name])
        if wanted and (arguments.only or not known):
            kept[name] = row_in_own_process(name, arguments.results / f"{name}.json", states[name], arguments.limit)
            console.print(_line(kept[name]), highlight=False)
    rows = [kept[name] for name in TASKS if name in kept]
    wrong = faults(rows)
    console.print("\n".join(["", *wrong]), markup=False, highlight=False)
    console.print(_summary(rows))
    if arguments.markdown:
        _write(arguments.markdown, rows, states)
    return 1 if wrong else 0


def _line(made: dict[str, Any]) -> str:
    cells = "  ".join(f"{step} {made['cells'].get(step, {}).get('status') or '-'}" for step in STEPS)
    return f"{made['name']}: {cells}  {sum(made.get('seconds', {}).values()):.0f} s"


def _summary(rows: list[dict[str, Any]]) -> str:
    cells = [cell["status"] for made in rows for cell in made["cells"].values()]
    return (
        f"{len(rows)} of {len(TASKS)} tasks: {cells.count('works')} cells work, in {cells.count('keras')} plain Keras "
        f"fails too, {cells.count('fault')} are faults of the kit"
    )


class _Notes:
    """Numbered notes; the same text has one number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        place = self.texts.index(text) + 1
        return f"[{place}](#note-{place})"

    def lines(self) -> list[str]:
        return [f'<a id="note-{place}"></a>{place}. {text}\n' for place, text in enumerate(self.texts, 1)]


def _cell(cell: dict[str, Any], notes: _Notes) -> str:
    if cell["status"] == "works":
        return cell["note"] + (f" {notes.number(_escaped(cell['warning']))}" if cell["warning"] else "")
    if cell["status"] == "keras":
        plain = Failure(*cell["plain"])
        told = f"Plain Keras, {plain.policy}: `{plain.line}`: {_escaped(plain.error)}"
        if cell["error"] != plain.error:
            told += f" The kit: {_escaped(cell['error'])}"
        return f"plain Keras fails {notes.number(told)}"
    return f"**fault** {notes.number(_escaped(cell['error']))}" if cell["status"] else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


COLUMNS = ("task", "what it is", "parameters", "stabilize: layers treated", "fit: losses of three steps",
           "find_nonfinite: where 2^60 overflows", "audit", "export_float32: low-precision nodes, difference",
           "convert: products, output", "reloaded: difference", "CPU seconds")  # fmt: skip


def _write(path: Path, rows: list[dict[str, Any]], states: dict[str, str]) -> None:
    notes = _Notes()
    table = []
    for made in rows:
        cells = [_cell(made["cells"].get(step, {"status": ""}), notes) for step in STEPS]
        seconds = f"{sum(made.get('seconds', {}).values()):.0f}"
        table.append("| " + " | ".join([made["name"], made["family"], *cells, seconds]) + " |")
    older = sum(not is_current(made, states[made["name"]]) for made in rows)
    told = f" {older} row{'s were' if older > 1 else ' was'} made by an earlier state of the sources." if older else ""
    lines = [
        "# Every task of KerasHub through the kit", "",
        f"`make tasks` on {time.strftime('%Y-%m-%d')}: keras {keras.__version__}, keras-hub {keras_hub.__version__}, "
        f"tensorflow {tf.__version__}, on a CPU.{told}", "",
        "Each task of KerasHub is built under mixed_float16 at a tiny size, without pretrained weights, and goes",
        "through these steps: `stabilize`; `fit` of three steps with `wrap_optimizer` (finite losses, weights that",
        "changed);",
        "`find_nonfinite`, which must find nothing in a clean step, and the overflow at a loss scale of 2^60; `audit`;",
        "`export_float32` with `verify`; `convert` of every product that can be converted; `save` and",
        "`load_model`, with the same outputs.", "",
        "Where a step fails, it is repeated in plain Keras on a fresh task. If that fails too, the note has the",
        "policy, the line of Python that was run, and its error. A step that fails where plain Keras works is a fault.",
        "Notes on steps that work are warnings of the kit.", "",
        f"{_summary(rows)}.", "",
        "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *table, "",
        "## Notes", "", *notes.lines(), "",
        "## Not in the table", "",
        *(f"- `{name}`: {reason}" for name, reason in OUTSIDE.items()),
    ]  # fmt: skip
    write_text("\n".join(lines) + "\n", path)


if __name__ == "__main__":
    raise SystemExit(main())
