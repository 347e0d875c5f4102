"""The end of every training recipe: save the model, export it in float32, write the summary and show it."""

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import keras_mp
from keras_mp.errors import ExportError
from keras_mp.parallel import workers
from keras_mp.training import PolicyChoice, atomic_write
from recipes.common.config import TrainingConfig
from recipes.common.curves import draw_curves
from recipes.common.fit import Training
from recipes.common.metric import written
from recipes.common.require import install_command

PACKAGES = ("keras-mp", "keras", "tensorflow", "jax", "numpy", "tensorflow-datasets", "scikit-learn")


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a training came to.

    Args:
        folder: the run's folder.
        policy: the dtype policy trained in.
        reason: the reason for that policy.
        metric: the name of the metric that the training is judged by, for example `"test accuracy"`.
        value: the value of the metric after the last epoch; an accuracy is between 0 and 1.
        step_seconds: the median seconds a step, without the compilation; None after fewer than two steps.
        compile_seconds: seconds of the first step, which compiles.
        peak_memory_bytes: the peak of memory, as `keras_mp.backend.peak_memory_bytes` says; None where it cannot be
            known.
        saved_model: the SavedModel's folder; None when it was not written.
        low_precision_ops: the number of 16- and 8-bit float operations in the SavedModel.
        max_difference: largest difference between the SavedModel and the model run in float32.
        interrupted: whether ctrl-C ended it early.
        evaluated: the test metrics in the precision `eval_policy`; empty without one.
    """

    folder: Path
    policy: str
    reason: str
    metric: str
    value: float
    step_seconds: float | None
    compile_seconds: float | None
    peak_memory_bytes: int | None
    saved_model: Path | None
    low_precision_ops: int | None
    max_difference: float | None
    interrupted: bool
    evaluated: dict[str, float]


def finish(
    model: keras.Model,
    config: TrainingConfig,
    folder: Path,
    choice: PolicyChoice,
    training: Training,
    metric: str,
    value: float,
    verify: np.ndarray,
) -> TrainingResult:
    """Saves the model, the curves, the SavedModel and the summary of a training, and prints the summary.

    Args:
        model: the trained model.
        config: the training recipe's config.
        folder: the run's folder.
        choice: the `keras_mp.PolicyChoice` it trained with.
        training: the result of `fit`; if ctrl-C ended it, nothing is exported.
        metric: the name of the metric that the training is judged by.
        value: the value of the metric.
        verify: a batch of inputs, to compare the SavedModel with the model on.

    Returns:
        The result, as written to `summary.json`.
    """
    # Of several processes all come here, because some of what is saved they hold together; the first one's files stay.
    console = Console(quiet=not workers.is_first())
    with atomic_write(folder / "model.keras") as partial:
        # Keras saves by the ending of the name.
        model.save(partial)
    draw_curves(
        training.history.rows, f"{config.name}: {choice.policy} on {keras.backend.backend()}", folder / "curves.png"
    )
    peak_memory_bytes = keras_mp.backend.peak_memory_bytes()
    report = None
    if config.export and workers.is_first() and not training.interrupted:
        report = _export(model, folder, verify, console)
    result = TrainingResult(
        folder=folder,
        policy=choice.policy,
        reason=choice.reason,
        metric=metric,
        value=value,
        step_seconds=training.timer.step_seconds,
        compile_seconds=training.timer.compile_seconds,
        peak_memory_bytes=peak_memory_bytes,
        saved_model=report.path if report else None,
        low_precision_ops=report.low_precision_ops if report else None,
        max_difference=report.max_difference if report else None,
        interrupted=training.interrupted,
        evaluated=training.evaluated,
    )
    summary = {"config": dataclasses.asdict(config), "versions": versions(), "result": dataclasses.asdict(result)}
    with atomic_write(folder / "summary.json") as partial:
        partial.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    console.print(summary_table(result, config))
    return result


def versions() -> dict[str, str]:
    """The versions that a result depends on: Python, the machine, the backend, and each package that is installed."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "backend": keras.backend.backend()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            here[package] = importlib.metadata.version(package)
    return here


def summary_table(result: TrainingResult, config: TrainingConfig) -> Table:
    """The summary as a table of two columns."""
    rows = {
        "policy": f"{result.policy}. {result.reason}",
        result.metric: written(result.metric, result.value) + (" (interrupted)" if result.interrupted else ""),
    }
    if result.evaluated:
        rows[f"tested in {config.eval_policy}"] = ", ".join(
            f"{name} {written(name, value)}" for name, value in result.evaluated.items()
        )
    if result.step_seconds:
        rate = config.batch_size / result.step_seconds
        rows["step time"] = f"{1e3 * result.step_seconds:.1f} ms without compilation, {rate:.0f} samples/s"
    if result.peak_memory_bytes is not None:
        rows["peak memory"] = f"{result.peak_memory_bytes / 2**20:.0f} MiB"
    if result.saved_model:
        rows["SavedModel"] = (
            f"{result.saved_model}: {result.low_precision_ops} nodes compute in 16 bits or fewer. Largest difference "
            f"from the model in float32: {result.max_difference:.1e}"
        )
    rows["files"] = f"{result.folder}: {', '.join(sorted(path.name for path in result.folder.iterdir()))}"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        # Text, because a string would be read as markup, and a folder's name may hold brackets.
        table.add_row(name, Text(value))
    return table


def _export(model, folder, verify, console):
    try:
        # There may be one of the same run, before it was resumed.
        return keras_mp.export_float32(model, folder / "saved_model", verify=verify, overwrite=True)
    except ImportError:
        console.print(
            "A SavedModel is written by TensorFlow, which is not installed here. Where it is, run:\n"
            f"  {install_command('tensorflow')}\n"
            f"  keras-mp export {folder / 'model.keras'} {folder / 'saved_model'}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        return None
    except (ExportError, OSError) as error:  # NaN weights, a full disk: what was measured is still written
        console.print(
            f"There is no SavedModel of this training: {error}", soft_wrap=True, highlight=False, markup=False
        )
        return None
