"""Which chip holds which GPT, by the dtypes of its weights and of AdamW's moments: compiled here, nothing attached.

    python benchmarks/small_states.py --markdown docs/optimizer-states.md
    python benchmarks/small_states.py --only h100

A training step with clipping and remat, batch 1 x 2048 a chip. It is compiled with 4 and with 8 blocks, and
extrapolated to the model's number: all blocks are alike. Each takes minutes on 2 cores; what has been compiled once is
kept (`KERAS_MP_CACHE`).
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras

import keras_mp
from keras_mp.parallel.plan import Plan
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed
from keras_mp.xla.extrapolate import inspect_by_blocks
from models.gpt import gpt
from models.transformer import Size

GIB = 2**30
MODELS = {"6.7B": Size(32, 4096, 32), "GPT-2 XL": Size(48, 1600, 25)}


class Cell(NamedTuple):
    """One row: a model on a chip, or on a slice of chips that share its state."""

    model: str
    target: str
    policy: str
    state_dtype: str
    reduce_dtype: str = "float32"


CELLS = (
    Cell("6.7B", "h100", "mixed_bfloat16", "float32"),
    Cell("6.7B", "h100", "mixed_bfloat16", "float8"),
    Cell("6.7B", "l40s", "bfloat16", "float8"),
    Cell("6.7B", "v5e-4", "mixed_bfloat16", "float8"),
    Cell("6.7B", "v5e-4", "mixed_bfloat16", "float8", "bfloat16"),
    Cell("6.7B", "v5e-4", "bfloat16", "float8"),
    Cell("GPT-2 XL", "v5e", "bfloat16", "float8"),
)
HEADER = (
    "model",
    "chip",
    "policy",
    "states",
    "gradients summed in",
    "weights and states, GiB",
    "temporary, GiB",
    "peak, GiB",
    "of the chip",
)
BEGIN, END = "<!-- table of benchmarks/small_states.py -->", "<!-- end of table -->"


def model_of(cell: Cell) -> keras.Model:
    """The model, compiled to train."""
    model = gpt(MODELS[cell.model], 50257, 2048, remat=True)
    inner = keras.optimizers.AdamW(1e-4, global_clipnorm=1.0)
    optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.NoLossScale(), state_dtype=cell.state_dtype)
    model.compile(optimizer, keras_mp.ChunkedCrossEntropy())
    return model


def row(cell: Cell) -> str:
    """Compiles the steps of a row."""
    _, chips = keras_mp.chips.parse_target(cell.target)
    tokens = keras.KerasTensor((chips, 2048), "int32")
    plan = Plan("fully_sharded", (), (chips,), cell.reduce_dtype) if chips > 1 else None
    with keras_mp.policy_scope(cell.policy):
        report = inspect_by_blocks(lambda: model_of(cell), (tokens, tokens), cell.target, strategy=plan)
    memory = report.memory
    for buffer in memory.largest[:12]:
        print(" ", buffer, file=sys.stderr)
    sizes = (memory.parameters + memory.optimizer, memory.temporary, memory.peak)
    share = memory.peak / memory.capacity
    verdict = f"{share:.0%}, {'fits' if memory.fits else 'does not fit'}"
    return " | ".join([*cell, *(f"{size / GIB:.2f}" for size in sizes), verdict])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that hold this word")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    rows = []
    for cell in CELLS:
        if options.only not in " ".join(cell):
            continue
        rows.append(f"| {row(cell)} |")
        print(rows[-1], flush=True)
    if options.markdown:
        versions = ", ".join(f"{name} {version}" for name, version in installed(("jax", "libtpu", "keras")).items())
        command = f"python benchmarks/small_states.py --markdown {options.markdown}"
        made = f"`{command}`, {date.today().isoformat()}, {versions}."
        header = [f"| {' | '.join(HEADER)} |", "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: |"]
        before, rest = options.markdown.read_text().split(BEGIN)
        after = rest.split(END)[1]
        write_text("\n".join([before + BEGIN, "", *header, *rows, "", made, "", END]) + after, options.markdown)


if __name__ == "__main__":
    main()
