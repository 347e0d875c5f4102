"""Which slice of TPUs holds which GPT, in float32 and mixed_bfloat16: compiled here, for chips that are not attached.

    python benchmarks/planner/scale_table.py --markdown docs/tables/scale-table.md
    python benchmarks/planner/scale_table.py --only 124M --markdown docs/tables/scale-table.md  # leaves the other rows
    python benchmarks/planner/scale_table.py --only "one block" # all of a small model, on slices of 16 and of 256 chips

Nothing is allocated and nothing runs. State is exact: the bytes of each variable and slot by the devices that share
it. Temporary memory and collectives are the compiler's, of a training step with 4 and with 8 blocks, extrapolated to
the model's number, because all blocks are alike; a row marked "all" is compiled in full, to check that. (With 2 blocks
the compiler fetches weights further ahead, and needs more than with 4.) A row that names another slice takes its
temporary memory from there: with as many rows a chip it hardly depends on the number of chips. It has no collectives,
because the compiler chooses them by the slice. The steps take minutes each on 2 cores; what has been compiled once is
kept (`KERAS_MP_CACHE`).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras

import keras_mp
from benchmarks.planner.by_blocks import SENT, collective_bytes, inspect_by_blocks
from keras_mp.parallel.plan import Plan, plan_of
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.lower import build_without_values
from keras_mp.planner.fit.fewer_blocks import BLOCKS
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed
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
    reduce_dtype: str = "float32"
    gather_dtype: str = "compute"

    @property
    def name(self) -> str:
        """What `--only` looks in, and what tells a row of the table from the others."""
        sent = f"{self.reduce_dtype}, {self.gather_dtype}"
        return f"{self.model} | {self.target}-{self.chips} | {self.strategy} | {self.precision} | {sent}"

    @property
    def slice(self) -> str:
        """The chips, as `inspect` takes them."""
        return f"{self.target}x{self.chips}"

    @property
    def plan(self) -> Plan:
        """How the model lies on the chips."""
        chips = find_target(self.slice)
        plan = plan_of(self.strategy, chips.devices, chips.topology)
        return dataclasses.replace(plan, reduce_dtype=self.reduce_dtype, gather_dtype=self.gather_dtype)


class Figures(NamedTuple):
    """What the compiler says of one chip, in bytes: of whole arrays, and of what a chip sends, by (kind, dtype).

    And of what it sends, how much products run beside.
    """

    state: float
    temporary: float
    whole: dict[tuple[str, str], float]
    wire: dict[tuple[str, str], float]
    covered: float = 0.0


MODELS = {
    "124M": Model(Size(12, 768, 12), 1024, 8, False),
    "6.7B": Model(Size(32, 4096, 32), 2048, 1, True),
    "one block": Model(Size(1, 1024, 16), 128, 1, False),
}
SMALLEST = ("bfloat16", "float8")
# What is compiled, in which precision; what gradients are summed and weights gathered in; and the slices that take its
# temporary memory.
COMPILED = (
    ("6.7B", "fully_sharded", "h100", 8, "mixed_bfloat16", SMALLEST, ()),
    ("6.7B", "fully_sharded", "v5e", 16, "mixed_bfloat16", SMALLEST, ()),
    ("6.7B", "fully_sharded", "v5e", 256, "mixed_bfloat16", SMALLEST, ()),
    ("6.7B", "fully_sharded", "h100", 8, "mixed_bfloat16", (), ()),
    ("6.7B", "fully_sharded", "v5e", 16, "mixed_bfloat16", (), (("v6e", 256),)),
    ("6.7B", "fully_sharded", "v5e", 256, "mixed_bfloat16", (), ()),
    ("6.7B", "fully_sharded", "v5e", 4, "mixed_bfloat16", (), (("v6e", 4),)),
    ("6.7B", "fully_sharded", "v5e", 8, "mixed_bfloat16", (), (("v6e", 8),)),
    (
        *("6.7B", "fully_sharded", "v5e", 16, "float32", ()),
        (("v5e", 4), ("v5e", 8), ("v5e", 256), ("v6e", 4), ("v6e", 8), ("v6e", 256)),
    ),
    ("124M", "fully_sharded", "v5e", 4, "float32", (), (("v5e", 256), ("v6e", 4), ("v6e", 256))),
    ("124M", "fully_sharded", "v5e", 4, "mixed_bfloat16", (), (("v5e", 256), ("v6e", 4), ("v6e", 256))),
    ("124M", "data", "v5e", 4, "mixed_bfloat16", (), (("v5e", 256), ("v6e", 4))),
    ("124M", "data", "v5e", 4, "float32", (), (("v5e", 256), ("v6e", 4))),
)
IN_FULL = Cell("124M", "fully_sharded", "v5e", 4, "mixed_bfloat16")
EXAMPLES = (
    Cell("one block", "fully_sharded", "v5e", 256, "mixed_bfloat16"),
    Cell("one block", "fully_sharded", "v5e", 16, "mixed_bfloat16"),
    Cell("one block", "fully_sharded", "v5e", 16, "mixed_bfloat16", *SMALLEST),
)


HEADER = """# Two GPTs compiled for slices of TPUs and for 8 H100

A training step with AdamW of a GPT of 124M (batch 8 x 1024 per chip) and of 6.7B parameters (batch 1 x 2048 per chip,
with remat), compiled for chips that are not attached. "sent in" is `reduce_dtype` of the gradients and `gather_dtype`
of the weights. State (weights and moments) is exact, computed from shapes. Temporary memory and collective operations
are the compiler's, for as many blocks as the table says, extrapolated to all blocks; "all" was compiled in full, as a
check. A row that names another slice takes its temporary memory from that slice; its own collectives are not known,
because the compiler chooses them by the slice. On the wire is what one chip sends in a step, on a ring; the time in
brackets is an estimate, at the rate of all of the chip's links. The share there is that of collectives beside which
products run in the compiled order; rows made before 2026-11-23, and one of that day, have none. Temporary memory of
rows made before 2026-11-25 has the gaps between arrays twice on TPUs. Whether a step fits was not tried.
`python benchmarks/planner/scale_table.py --markdown docs/tables/scale-table.md`, on the day in the last column; the
last rows made with {made}.

"""
COLUMNS = (
    "| model | slice | strategy | precision | sent in | state, GiB a chip | temporary, GiB a chip | fits "
    "| collectives, GiB of whole arrays | on the wire, GiB a chip | blocks compiled, and where | made |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)


def state_bytes(cell: Cell) -> int:
    """The bytes of weights and AdamW's two moments on one chip, from shapes alone."""
    plan = plan_of(cell.strategy, cell.chips)
    variables = build_without_values(lambda: model_of(cell, MODELS[cell.model].size.layers)).trainable_variables
    total = 0
    for variable in variables:
        shape = tuple(variable.shape)
        axes = plan.axes_of(variable.path, shape, "float32")
        total += 3 * 4 * math.prod(shape) // (cell.chips if any(axes) else 1)
    return total


def model_of(cell: Cell, layers: int) -> keras.Model:
    """The model with this many blocks, compiled to train."""
    model = MODELS[cell.model]
    built = gpt(model.size._replace(layers=layers), 50257, model.length, remat=model.remat)
    built.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.lean.ChunkedCrossEntropy())
    return built


def measure(cell: Cell, layers: int, *, in_full: bool = False) -> Figures:
    """Compiles the step of a model with this many blocks, in full or with few of them."""
    model = MODELS[cell.model]
    tokens = keras.KerasTensor((model.rows * cell.chips, model.length), "int32")
    with keras_mp.set_global_policy(cell.precision):
        report = (keras_mp.inspect if in_full else inspect_by_blocks)(
            lambda blocks=layers: model_of(cell, blocks), (tokens, tokens), cell.slice, strategy=cell.plan
        )
    sent = collective_bytes(report) if in_full else report.collectives
    whole, wire, covered = ({key[:2]: size for key, size in sent.items() if key[2] == name} for name in SENT)
    temporary = report.memory.temporary
    print(f"{cell}, {layers} blocks: temporary {temporary / GIB:.3f} GiB, {whole}, on the wire {wire}, "
          f"compiled in {report.seconds:.0f} s", flush=True)  # fmt: skip
    return Figures(state_bytes(cell), temporary, whole, wire, sum(covered.values()))


def row(cell: Cell, figures: Figures, how: str) -> str:
    """A line of the table."""
    capacity = keras_mp.chips.CHIPS[cell.target].memory_bytes
    need = figures.state + figures.temporary
    fits = "yes" if need <= capacity else "no"
    return (
        f"| {cell.name} | {figures.state / GIB:.3f} "
        f"| {figures.temporary / GIB:.2f} | {fits}, {need / capacity:.0%} "
        f"| {_listed(figures.whole)} | {_sent(figures, cell)} "
        f"| {how} | {datetime.date.today().isoformat()} |"
    )


def _listed(sizes: dict[tuple[str, str], float]) -> str:
    """The sizes of at least 5 MiB, the largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = [f"{kind} {dtype} {size / GIB:.2f}" for (kind, dtype), size in ordered if size >= GIB / 200]
    return ", ".join(shown) or "-"


def _sent(figures: Figures, cell: Cell) -> str:
    """What a chip sends, how long its links take for that, and the share that products run beside."""
    if not figures.wire:
        return "-"
    chip, total = keras_mp.chips.CHIPS[cell.target], sum(figures.wire.values())
    seconds = total / (chip.link.bandwidth / chip.devices)
    beside = f"{figures.covered / total:.0%} beside products"
    return f"{total / GIB:.2f} ({seconds:.2g} s, {beside}): {_listed(figures.wire)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="the file to write the table to")
    parser.add_argument("--only", default="", help="cells whose model, slice, strategy and precision hold this")
    arguments = parser.parse_args()
    for *place, sent, others in COMPILED:
        cell = Cell(*place, *sent)
        if arguments.only not in cell.name:
            continue
        layers = MODELS[cell.model].size.layers
        figures = measure(cell, layers)
        lines = [row(cell, figures, how := f"{BLOCKS[0]} and {BLOCKS[1]} of {layers}")]
        for target, chips in others:
            there = cell._replace(target=target, chips=chips)
            moved = Figures(state_bytes(there), figures.temporary, {}, {})
            lines.append(row(there, moved, f"{how}, {cell.target}-{cell.chips}"))
        _write(lines, arguments.markdown)
    if not arguments.only:
        layers = MODELS[IN_FULL.model].size.layers
        _write([row(IN_FULL, measure(IN_FULL, layers, in_full=True), f"all {layers}")], arguments.markdown)
    for cell in EXAMPLES if arguments.only == "one block" else ():
        _write([row(cell, measure(cell, 1, in_full=True), "all 1")], None)


def _write(lines: list[str], path: Path | None) -> None:
    """Prints rows, and puts them into the table in place of those of the same cells and blocks."""
    print("\n".join(lines), flush=True)
    if not path:
        return
    old = path.read_text().splitlines() if path.is_file() else []
    rows = {_key(line): line for line in old if line.startswith("| ") and line not in COLUMNS}
    rows |= {_key(line): line for line in lines}
    cells = [Cell(*place, *sent) for *place, sent, _ in COMPILED]
    moved = [cell._replace(target=target, chips=chips) for cell, (*_, others) in zip(cells, COMPILED, strict=True)
             for target, chips in others]  # fmt: skip
    order = [cell.name for cell in (*cells, *moved)]
    known = [line for key, line in sorted(rows.items(), key=lambda item: _place(item[0], order))]
    versions = ", ".join(f"{name} {text}" for name, text in installed(("jax", "libtpu", "keras")).items())
    write_text(HEADER.format(made=versions) + "\n".join([*COLUMNS, *known]) + "\n", path)


def _key(line: str) -> tuple[str, bool]:
    """The cell of a row, and whether it was compiled in full."""
    columns = [column.strip() for column in line.strip("| ").split(" | ")]
    return " | ".join(columns[:5]), columns[-2].startswith("all ")


def _place(key: tuple[str, bool], order: list[str]) -> tuple[bool, int]:
    return key[1], order.index(key[0]) if key[0] in order else len(order)


if __name__ == "__main__":
    main()
