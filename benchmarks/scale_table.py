"""Which slice of TPUs holds which GPT, in float32 and mixed_bfloat16: compiled here, for chips that are not attached.

    python benchmarks/scale_table.py --markdown docs/scale-table.md
    python benchmarks/scale_table.py --only 124M

Nothing is allocated and nothing runs. A cell is a training step, compiled with 2 and with 4 blocks and extrapolated to
the model's number: state, temporary memory and bytes of collectives are sums over blocks, of which all are alike. A
cell marked "in full" is compiled with all blocks as well, to check that. The steps take minutes each on 2 cores; what
has been compiled once is kept (`KERAS_MP_CACHE`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras

import keras_mp
from models.gpt import gpt
from models.transformer import Size

GIB = 2**30


class Model(NamedTuple):
    """A GPT and the rows of a chip; 6.7B is the size of that name in table 2.1 of Brown et al. 2020."""

    size: Size
    length: int
    rows: int
    remat: bool


class Cell(NamedTuple):
    """One row of the table."""

    model: str
    strategy: str
    target: str
    chips: int
    precision: str


class Figures(NamedTuple):
    """What the compiler says of one chip, in bytes; `sent` by (kind, dtype)."""

    state: float
    temporary: float
    sent: dict[tuple[str, str], float]


MODELS = {
    "124M": Model(Size(12, 768, 12), 1024, 8, False),
    "6.7B": Model(Size(32, 4096, 32), 2048, 1, True),
}
PRECISIONS = ("float32", "mixed_bfloat16")
SLICES = (
    ("124M", "data", "v5e", 4),
    ("124M", "fully_sharded", "v5e", 4),
    ("124M", "fully_sharded", "v6e", 4),
    ("6.7B", "fully_sharded", "v5e", 16),
    ("6.7B", "fully_sharded", "v6e", 16),
    ("6.7B", "fully_sharded", "v5e", 256),
)
CELLS = [Cell(*place, precision) for place in SLICES for precision in PRECISIONS]
IN_FULL = Cell("124M", "fully_sharded", "v5e", 4, "mixed_bfloat16")


def measure(cell: Cell, layers: int) -> Figures:
    """Compiles a step with this many blocks."""
    model = MODELS[cell.model]

    def build() -> keras.Model:
        size = model.size._replace(layers=layers)
        built = gpt(size, 50257, model.length, remat=model.remat)
        built.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.ChunkedCrossEntropy())
        return built

    tokens = keras.KerasTensor((model.rows * cell.chips, model.length), "int32")
    with keras_mp.policy_scope(cell.precision):
        report = keras_mp.inspect(build, (tokens, tokens), cell.target, strategy=cell.strategy, chips=cell.chips)
    memory = report.memory
    state = memory.arguments + memory.outputs - memory.aliased
    sent = {(each.kind, each.dtype): float(each.bytes) for each in report.collectives}
    print(f"{cell}, {layers} blocks: state {state / GIB:.3f} GiB, temporary {memory.temporary / GIB:.3f}, {sent}, "
          f"compiled in {report.seconds:.0f} s", flush=True)  # fmt: skip
    return Figures(state, memory.temporary, sent)


def extrapolate(two: Figures, four: Figures, layers: int) -> Figures:
    """The line through 2 and 4 blocks, at this many."""

    def line(at_two: float, at_four: float) -> float:
        return at_two + (at_four - at_two) / 2 * (layers - 2)

    kinds = {*two.sent, *four.sent}
    sent = {kind: line(two.sent.get(kind, 0.0), four.sent.get(kind, 0.0)) for kind in kinds}
    return Figures(line(two.state, four.state), line(two.temporary, four.temporary), sent)


def row(cell: Cell, figures: Figures, how: str) -> str:
    """A line of the table."""
    capacity = keras_mp.chips.CHIPS[cell.target].memory_bytes
    need = figures.state + figures.temporary
    sent = ", ".join(
        f"{kind} {dtype} {size / GIB:.2f}"
        for (kind, dtype), size in sorted(figures.sent.items(), key=lambda item: -item[1])
        if size >= GIB / 200
    )
    return (
        f"| {cell.model} | {cell.target}-{cell.chips} | {cell.strategy} | {cell.precision} | {figures.state / GIB:.2f} "
        f"| {figures.temporary / GIB:.2f} | {'yes' if need <= capacity else 'no'}, {need / capacity:.0%} | {sent} | {how} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="the file to write the table to")
    parser.add_argument("--only", default="", help="cells whose model, slice, strategy and precision hold this")
    arguments = parser.parse_args()
    lines = [
        "| model | slice | strategy | precision | state, GiB a chip | temporary, GiB a chip | fits | collectives, GiB of "
        "whole arrays | blocks compiled |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in CELLS:
        if arguments.only not in f"{cell.model} {cell.target}-{cell.chips} {cell.strategy} {cell.precision}":
            continue
        layers = MODELS[cell.model].size.layers
        found = extrapolate(measure(cell, 2), measure(cell, 4), layers)
        lines.append(row(cell, found, f"2, 4; extrapolated to {layers}"))
        if cell == IN_FULL:
            lines.append(row(cell, measure(cell, layers), f"in full: {layers}"))
        print("\n".join(lines), flush=True)
        if arguments.markdown:
            arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
