"""Times steps of one model in several precisions, interleaved."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.bench.benchmark_report import BenchmarkReport
from keras_mp.bench.workloads import Task, compare, device_of
from keras_mp.numerics.data import batches_of
from keras_mp.precision.policy import PRECISIONS
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.system.argument_checks import one_of, whole_number

BASE = "float32"


def benchmark(
    model: keras.Model | str | os.PathLike[str],
    batch: Any,
    compare: Sequence[str] = ("mixed_bfloat16",),
    *,
    rounds: int = 20,
    seconds: float = 0.5,
    verbose: bool = False,
) -> BenchmarkReport:
    """Measures a training step in several precisions.

    They run side by side on this machine. Each precision runs in a separate process, on the backend of this one. A
    round measures each of them once, so that other load on the machine affects all equally. The first step, which
    compiles, is timed separately. The model is not changed. Call this before this process computes on a GPU, because it
    then holds most of the GPU's memory.

    Args:
        model: a compiled keras.Model, or the path of a .keras file with one. Custom classes live in a module that can
            be imported, not in the script or notebook that runs.
        batch: `(x, y)` or `(x, y, sample_weight)` of arrays.
        compare: names of "mixed_bfloat16", "mixed_float16" and "fp8"; float32 is always measured, and ratios are
            relative to it.
        rounds: the number of measurements of each precision.
        seconds: the approximate time that each precision runs in a round, in seconds; it runs at least one step.
        verbose: whether a line on the standard error says which measurement begins.

    Returns:
        The report. A precision that this device cannot run, or that ran out of memory, is a row with the reason.

    Raises:
        ValueError: If there is nothing to compare, a precision is unknown, the model has no optimizer or is of classes
            that cannot be imported, or there is less than one round.
        FileNotFoundError: If there is no such file.
    """
    names = check_precisions(compare)
    if isinstance(model, keras.Model) and getattr(model, "optimizer", None) is None:
        raise ValueError(f"model {model.name!r} has no optimizer: compile it for training first")
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"path": str(Path(folder) / "model.keras"), "data": str(Path(folder) / "batch")}
        if isinstance(model, keras.Model):
            arguments["imports"] = _modules_of(model)
            model.save(arguments["path"])
        else:
            if not Path(model).is_file():
                raise FileNotFoundError(f"there is no file {str(model)!r}")
            arguments["path"] = str(model)
        x, y, weight = batches_of([batch], 1)[0]
        Path(arguments["data"]).write_bytes(pickle.dumps((x, y) if weight is None else (x, y, weight)))
        title = f"{getattr(model, 'name', model)}: a training step"
        return time_in_processes(
            "keras_mp.bench.keras_step:file",
            arguments,
            names,
            title,
            rounds=rounds,
            seconds=seconds,
            log=lambda text: print(text, file=sys.stderr) if verbose else None,
        )


def check_precisions(compare: Sequence[str]) -> list[str]:
    """The precisions to measure, float32 first."""
    wanted = [compare] if isinstance(compare, str) else list(compare)
    for name in wanted:
        one_of("compare", name, PRECISIONS)
    if not set(wanted) - {BASE}:
        raise ValueError(f"compare={wanted!r} leaves nothing to compare with {BASE}: name another")
    return [BASE, *dict.fromkeys(name for name in wanted if name != BASE)]


def time_in_processes(
    function: str,
    arguments: dict[str, Any],
    precisions: Sequence[str],
    title: str,
    *,
    rounds: int,
    seconds: float,
    log: Callable[[str], None],
) -> BenchmarkReport:
    """Measures what a function makes, each in a process.

    Args:
        function: "module:function" that takes `precision` besides the arguments, as in `keras_mp.bench.keras_step`.
        precisions: the precisions, float32 first.
    """
    environment = {"KERAS_BACKEND": keras.backend.backend()}
    tasks = [Task(name, function, {**arguments, "precision": name}, environment) for name in precisions]
    paths = [path or os.getcwd() for path in sys.path]
    if not seconds >= 0:  # 0 is one step a round
        raise ValueError(f"seconds must be 0 or above, got {seconds}")
    whole_number("rounds", rounds)
    rows = compare(tasks, rounds=rounds, seconds=seconds, paths=paths, log=log)
    return BenchmarkReport(f"{title} on {device_of(rows)}, {keras.backend.backend()}", BASE, rows)


def _modules_of(model: keras.Model) -> list[str]:
    """The modules that a process imports to load a model."""
    parts: Iterable[Any] = [model, *layers_by_path(model).values(), model.optimizer, model.loss]
    modules = {type(part).__module__ for part in parts} | {getattr(model.loss, "__module__", "keras")}
    if "__main__" in modules:
        here = [type(part).__name__ for part in parts if type(part).__module__ == "__main__"]
        raise ValueError(
            f"model {model.name!r} has classes of the script that runs ({', '.join(here) or 'its loss'}), which other "
            "processes cannot import: put them into a module"
        )
    return sorted(name for name in modules if not name.startswith(("keras.", "keras_mp.", "builtins")))
