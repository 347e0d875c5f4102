"""Small optimizer states: which chip holds which GPT, and what AdamW's update costs. Compiled here, nothing attached.

    python benchmarks/small_states.py --markdown docs/tables/states-table.md
    python benchmarks/small_states.py --only h100
    python benchmarks/small_states.py --update

A training step with clipping and remat, batch 1 x 2048 a chip. It is compiled with 4 and with 8 blocks, and
extrapolated to the model's number: all blocks are alike. Each takes minutes on 2 cores; what has been compiled once is
kept (`KERAS_MP_CACHE`).

--update is of one weight of 8192 x 8192, whose gradient comes in bfloat16. Bytes are what lies in memory between two
steps, without the gradient. Cycles are the TPU compiler's own estimate, of those of Keras's AdamW: of the update alone,
and with the check that all gradients are finite, which `LossScaleOptimizer` makes for every `state_dtype`, and which a
whole step makes where a gradient is computed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import keras
from results import put_table

import keras_mp
from benchmarks.planner.by_blocks import inspect_by_blocks
from keras_mp import backend
from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.lowered import Lowered
from keras_mp.parallel.plan import Plan
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.precision.chips import parse_target
from keras_mp.system.packages import installed
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
SIDE = 8192
ROWS = (
    ("Keras's AdamW", "float32", None),
    ("states in float32", "float32", "float32"),
    ("states in bfloat16", "float32", "bfloat16"),
    ("states in float8", "float32", "float8"),
    ("states in float8, weights in bfloat16", "bfloat16", "float8"),
)


def model_of(cell: Cell, blocks: int) -> keras.Model:
    """The model with so many blocks, compiled to train."""
    model = gpt(MODELS[cell.model]._replace(layers=blocks), 50257, 2048, remat=True)
    inner = keras.optimizers.AdamW(1e-4, global_clipnorm=1.0)
    optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none(), state_dtype=cell.state_dtype)
    model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy())
    return model


def row(cell: Cell) -> str:
    """Compiles the steps of a row."""
    _, chips = parse_target(cell.target)
    tokens = keras.KerasTensor((chips, 2048), "int32")
    plan = Plan("fully_sharded", (), (chips,), cell.reduce_dtype) if chips > 1 else None

    def build(blocks: int = MODELS[cell.model].layers) -> keras.Model:
        return model_of(cell, blocks)

    with keras_mp.set_global_policy(cell.policy):
        report = inspect_by_blocks(build, (tokens, tokens), cell.target, strategy=plan)
    memory = report.memory
    for buffer in memory.largest[:12]:
        print(" ", buffer, file=sys.stderr)
    sizes = (memory.parameters + memory.optimizer, memory.temporary, memory.peak)
    share = memory.peak / memory.capacity
    verdict = f"{share:.0%}, {'fits' if memory.fits else 'does not fit'}"
    return " | ".join([*cell, *(f"{size / GIB:.2f}" for size in sizes), verdict])


def lowered(dtype: str, state_dtype: str | None, platform: str, checked: bool) -> tuple[Lowered, int]:
    """The update, and the bytes that it keeps."""
    with backend.no_allocation():
        weight = keras.Variable(shape=(SIDE, SIDE), initializer="zeros", dtype=dtype)
        optimizer: Any = keras.optimizers.AdamW(1e-3)
        if state_dtype is not None:
            optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none(), state_dtype=state_dtype)
        optimizer.build([weight])

    def shape(variable: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)

    weights, slots = [shape(weight)], [shape(variable) for variable in optimizer.variables]
    gradient = [jax.ShapeDtypeStruct((SIDE, SIDE), "bfloat16")]

    def update(weights: Any, slots: Any, gradient: Any) -> Any:
        if checked or state_dtype is None:
            return optimizer.stateless_apply(slots, gradient, weights)
        before = zip([weight, *optimizer.variables], [*weights, *slots], strict=True)
        with keras.StatelessScope(state_mapping=list(before)) as scope:
            optimizer._update(gradient, [weight])
        return [scope.get_current_value(weight)], [scope.get_current_value(slot) for slot in optimizer.variables]

    with backend.traced_for(TracedChip({"cuda": "gpu"}.get(platform, platform))):
        traced = jax.jit(update, donate_argnums=(0, 1)).trace(weights, slots, gradient)
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    text = io.BytesIO()
    module.operation.write_bytecode(text)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in [*weights, *slots])
    return Lowered(text.getvalue(), (), (), "jax", "update"), kept


def cycles(dtype: str, state_dtype: str | None, target: str, checked: bool) -> int:
    """The compiler's estimate, added up over the kernels."""
    step, _ = lowered(dtype, state_dtype, "tpu", checked)
    return sum(kernel.cycles for kernel, _ in compile_step(step, find_target(target)).module.kernels())


def update_table() -> None:
    """Prints the table of the update."""
    chips = ("v5e", "v6e")
    header = [f"{chip}: {what}" for chip in chips for what in ("update", "with the check")]
    print(f"| AdamW | bytes a parameter | {' | '.join(header)} | H100: temporary, bytes a parameter |")
    print(f"| --- |{' ---: |' * (len(header) + 2)}")
    plain = {chip: cycles("float32", None, chip, checked=False) for chip in chips}
    for name, dtype, state_dtype in ROWS:
        cells = []
        for chip in chips:
            for checked in (False, True) if state_dtype else (False,):
                cells.append(f"{cycles(dtype, state_dtype, chip, checked) / plain[chip]:.2f}")
            if state_dtype is None:
                cells.append("-")
        step, kept = lowered(dtype, state_dtype, "cuda", checked=False)
        memory = compile_step(step, find_target("h100")).statistics
        cells.append(f"{memory['temp'] / SIDE**2:.2f}")
        print(f"| {name} | {kept / SIDE**2:.2f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that hold this word")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    parser.add_argument("--update", action="store_true", help="the update of one weight instead")
    options = parser.parse_args()
    if options.update:
        update_table()
        return
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
        put_table(options.markdown, "small_states.py", [*header, *rows, "", made])


if __name__ == "__main__":
    main()
