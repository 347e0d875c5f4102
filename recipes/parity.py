"""Trains a recipe in three precisions and several seeds, and compares what they reach.

    python -m recipes.parity digits --seeds 3 --out docs/digits-parity.md

Options after these go to the recipe: `--epochs 5`. Each training is a process of its own, so that none inherits the
policy, the compiled functions or the random state of the one before.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from recipes.common.run_folder import written_beside

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


def run(recipe: str, precision: str, seed: int, options: Sequence[str]) -> dict:
    """Runs the recipe once, in a process of its own.

    Returns:
        The run's summary: `config`, `versions`, `result`.

    Raises:
        RuntimeError: the run failed; the message holds what it printed last.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours = ["--policy", precision, "--seed", str(seed), "--output", folder, "--name", "run", "--no-export"]
        command = [sys.executable, "-m", "recipes", recipe, *options, *ours]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed: {(process.stderr or process.stdout)[-2000:]}")
        return json.loads((Path(folder) / "run" / "summary.json").read_text())


def table(accuracies: dict[str, list[float]]) -> str:
    """Lays out the accuracies of each precision, a column a seed, as Markdown.

    Args:
        accuracies: test accuracies between 0 and 1, a seed after the other, by precision.

    Returns:
        The table, and a line with the largest difference between two means, in percentage points.
    """
    seeds = range(len(next(iter(accuracies.values()))))
    lines = ["| precision | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |"]
    lines.append("| --- |" + " ---: |" * (len(seeds) + 1))
    means = {precision: statistics.mean(values) for precision, values in accuracies.items()}
    for precision, values in accuracies.items():
        lines.append(f"| {precision} | " + " | ".join(f"{value:.2%}" for value in [*values, means[precision]]) + " |")
    difference = 100 * (max(means.values()) - min(means.values()))
    return "\n".join(lines) + f"\n\nLargest difference between two means: {difference:.2f} percentage points.\n"


def main(arguments: Sequence[str]) -> int:
    """Runs all, prints the table and writes it with what is needed to do it again."""
    parser = argparse.ArgumentParser(prog="python -m recipes.parity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="name or path of a recipe")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ... (default: 3)")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    known, options = parser.parse_known_args(list(arguments))
    if known.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {known.seeds}")
    accuracies: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in range(known.seeds):
        for precision in PRECISIONS:
            summary = run(known.recipe, precision, seed, options)
            accuracies[precision].append(summary["result"]["test_accuracy"])
            print(f"{precision:<15} seed {seed}: {accuracies[precision][-1]:.2%}", flush=True)
    print("\n" + table(accuracies))
    if known.out:
        versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        command = shlex.join(["python", "-m", "recipes.parity", *arguments])
        text = (
            f"# {known.recipe}: test accuracy by precision\n\n{table(accuracies)}\n"
            f"{date.today()}: {versions}. To do it again:\n\n```\n{command}\n```\n"
        )
        with written_beside(known.out) as partial:
            partial.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
