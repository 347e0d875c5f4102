"""Trains a training recipe in several precisions and several seeds, and compares what they reach.

    python benchmarks/recipe_parity.py digits --seeds 3 --out docs/tables/digits-parity.md
    python benchmarks/recipe_parity.py language_model --precisions float32,mixed_bfloat16 \\
        --out docs/tables/language-model-parity.md
    python benchmarks/recipe_parity.py language_model --precisions mixed_bfloat16,fp8,fp8:delayed --curves fp8.svg

Options after these go to the training recipe: `--epochs 5`. Each training is a process of its own, so that none
inherits the policy, the compiled functions or the random state of the one before.
"""

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.svg_pictures import difference_picture
from keras_mp.fp8.scaling import PRESETS
from keras_mp.precision.policy import PRECISIONS
from keras_mp.system.atomic_write import atomic_write, write_text
from recipes.common.metric import difference, written

COMPARED = ("float32", "mixed_bfloat16", "mixed_float16")
KNOWN = (*PRECISIONS, *(f"fp8:{name}" for name in PRESETS))


def run(recipe: str, precision: str, seed: int, options: Sequence[str]) -> dict:
    """Runs the training recipe once, in a process of its own.

    Returns:
        The run's summary: `config`, `versions`, `result`; and its `history`, the loss on the test data by epoch.

    Raises:
        RuntimeError: the run failed; the message holds what it printed last.
    """
    with tempfile.TemporaryDirectory() as folder:
        policy, _, scaling = precision.partition(":")
        ours = ["--policy", policy, "--seed", str(seed), "--output", folder, "--name", "run", "--no-export"]
        ours += ["--fp8", scaling] if scaling else []
        command = [sys.executable, "-m", "keras_mp.cli", "train", recipe, *options, *ours]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if process.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed: {(process.stderr or process.stdout)[-2000:]}")
        with (Path(folder) / "run" / "history.csv").open(newline="") as file:
            history = [float(row["test_loss"]) for row in csv.DictReader(file)]
        return json.loads((Path(folder) / "run" / "summary.json").read_text()) | {"history": history}


def table(metric: str, values: dict[str, list[float]]) -> str:
    """Lays out what each precision reached, a column a seed, as Markdown.

    Args:
        metric: the name of the values, for example `"test accuracy"`.
        values: the values of each precision, a seed after the other.

    Returns:
        The table, and a line with the largest difference between two means.
    """
    seeds = range(len(next(iter(values.values()))))
    lines = ["| precision | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |"]
    lines.append("| --- |" + " ---: |" * (len(seeds) + 1))
    means = {precision: statistics.mean(reached) for precision, reached in values.items()}
    for precision, reached in values.items():
        cells = [written(metric, value) for value in [*reached, means[precision]]]
        lines.append(f"| {precision} | " + " | ".join(cells) + " |")
    gap = difference(metric, list(means.values()))
    return "\n".join(lines) + f"\n\nLargest difference between two means: {gap}.\n"


def curves(histories: dict[str, list[list[float]]]) -> str:
    """Lays out the loss on the test data after each epoch, the mean of the seeds, as Markdown.

    Args:
        histories: the losses by epoch, a list a seed, by precision.

    Returns:
        The table, a column a precision.
    """
    lines = ["| epoch | " + " | ".join(histories) + " |", "| ---: |" + " ---: |" * len(histories)]
    means = [[statistics.mean(epoch) for epoch in zip(*seeds, strict=True)] for seeds in histories.values()]
    for epoch, row in enumerate(zip(*means, strict=True), start=1):
        lines.append(f"| {epoch} | " + " | ".join(f"{loss:.4f}" for loss in row) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Runs all trainings, prints the table, and writes it with the command that reproduces it."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/recipe_parity.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("recipe", help="name or path of a training recipe")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0 (default: 3)")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument(
        "--curves", type=Path, help="picture to write, an SVG: by epoch, the loss less the first precision's"
    )
    parser.add_argument("--precisions", default=",".join(COMPARED), help="separated by commas (default: %(default)s)")
    known, options = parser.parse_known_args(list(arguments))
    if known.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {known.seeds}")
    values: dict[str, list[float]] = {precision: [] for precision in known.precisions.split(",")}
    for precision in values:
        if precision not in KNOWN:
            parser.error(f"--precisions are some of {', '.join(KNOWN)}, got {precision!r}")
    histories: dict[str, list[list[float]]] = {precision: [] for precision in values}
    for seed in range(known.seeds):
        for precision in values:
            summary = run(known.recipe, precision, seed, options)
            metric, value = summary["result"]["metric"], summary["result"]["value"]
            values[precision].append(value)
            histories[precision].append(summary["history"])
            print(f"{precision:<15} seed {seed}: {metric} {written(metric, value)}", flush=True)
    print("\n" + table(metric, values) + "\n" + curves(histories))
    if known.curves:
        reference = next(iter(histories))
        title = f"{known.recipe}: loss on the test data less {reference}'s with the same seed, the mean of the seeds"
        write_text(difference_picture(histories, reference, x_title="epoch", y_title=title), known.curves)
    if known.out:
        versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        command = shlex.join(["python", "benchmarks/recipe_parity.py", *arguments])
        text = (
            f"# {known.recipe}: {metric} by precision\n\n"
            f"The training recipe `{known.recipe}`, trained once with each seed in each precision.\n\n"
            f"{table(metric, values)}\n"
            f"Mean loss on the test data after each epoch:\n\n{curves(histories)}\n"
            f"{date.today()}: {versions}. To reproduce:\n\n```\n{command}\n```\n"
        )
        with atomic_write(known.out) as partial:
            partial.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
