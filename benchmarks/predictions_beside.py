"""Sections of the page of predictions that are about no published run: fewer blocks, and this machine's CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
# What depths.json compares, and how the page writes it.
_DEPTHS = {
    "time": "time of a step",
    "products": "of it, products",
    "other": "of it, other kernels",
    "uncovered": "of it, uncovered collectives",
    "memory": "peak memory of a device",
    "temporary": "of it, temporary",
}


def depths() -> str:
    """The line through few blocks and more against the step with many more."""
    path = FOLDER / "depths.json"
    if not path.exists():
        return "Not compiled yet: `python benchmarks/depths.py`."
    kept = json.loads(path.read_text())
    few, more, many = kept["blocks"]
    rows = []
    for name, title in _DEPTHS.items():
        line, compiled = kept["line"][name], kept["compiled"][name]
        scale, unit = (1e-9, "GB") if name in ("memory", "temporary") else (1e3, "ms")
        off = f"{line / compiled - 1:+.1%}" if compiled else "-"
        rows.append((title, f"{line * scale:.4g} {unit}", f"{compiled * scale:.4g} {unit}", off))
    return (
        f"Llama 3 8B, bfloat16, fully sharded over 8 H100: the line through the steps with {few} and {more} blocks, at "
        f"{many} blocks, beside the step that was compiled with {many}. `python benchmarks/depths.py`.\n\n"
        + table(("", f"on the line, {many} blocks", f"compiled, {many} blocks", "the line is off by"), rows)
    )


def cpu() -> str:
    """Predictions for this machine's CPU against `keras_mp.benchmark`."""
    path = FOLDER / "cpu_predictions.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/cpu_predictions.py`."
    kept = json.loads(path.read_text())
    rows = []
    for name, predicted in kept["predicted"].items():
        took, measured, ratio = kept["measured"].get(name), "-", "-"
        if took:
            low, median, high = (f"{took[which] * 1e3:,.0f}" for which in ("low", "median", "high"))
            measured, ratio = f"{median} ms ({low} to {high})", f"{predicted['seconds'] / took['median']:.2f}"
        predicted_time, *parts = (f"{predicted[part] * 1e3:,.0f} ms" for part in ("seconds", "products", "other"))
        rows.append((name, measured, predicted_time, ratio, *parts))
    return (
        "The three models for a CPU of `benchmarks/peer_workloads.py`, in float32 on JAX, 2 cores. The constants are "
        "fitted to products, convolutions and sums that the command measures on the same CPU, and not to the models. "
        "Measured with `keras_mp.benchmark`: the median of the rounds, with its quartiles. "
        "`python benchmarks/cpu_predictions.py`.\n\n"
        + table(("model", "measured", "predicted", "ratio", "products", "other"), rows)
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ("---", *["---"] * (len(names) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
