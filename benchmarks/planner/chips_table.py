"""Compiles a training step for every NVIDIA GPU of the table of chips: does each product stay in its precision?

    python benchmarks/planner/chips_table.py --markdown docs/tables/chips-table.md

The digits network of recipes/digits.py, on 64 images, and a GPT of 2 blocks of width 128, on 4 sequences of 32 tokens,
each with its loss, backward pass and AdamW. A cell counts the products that are asked for in the dtype of the
precision, and those of them that run in it. What has been compiled once is kept (`KERAS_MP_CACHE`), and the table is
written anew after each chip, so a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import keras

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step, traced
from keras_mp.lowering.lowered import Lowered
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.read.matmuls import join
from keras_mp.precision.chip import Chip, GpuDescription
from keras_mp.precision.hardware import Device, support
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed
from models.gpt import gpt
from models.transformer import Size
from recipes import digits

# The dtype of the products in each precision.
PRECISIONS = {"float32": "float32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16", "fp8": "float8"}

HEADER = """# A training step on every GPU of the table of chips

A training step of the digits network (`recipes/digits.py`, 64 images; convolutions, so not in FP8) and of a GPT (2
blocks of width 128, 4 sequences of 32 tokens), with AdamW, compiled for GPUs that are not attached. "29 of 29" means
that 29 products are asked for in the precision's dtype and all 29 run in it in the compiled program. A cell is empty
where the GPU has no hardware for the precision. In float32, GPUs from Ampere on run the products as TensorFloat-32.
`python benchmarks/planner/chips_table.py --markdown docs/tables/chips-table.md`, {made}.

"""


class Step(NamedTuple):
    """A step that is compiled, and the model's name in the table."""

    model: str
    precision: str


def digits_step(precision: str) -> tuple[keras.Model, Any]:
    """The digits network as its training recipe builds it."""
    return digits.step(digits.Config(policy=precision))


def gpt_step(precision: str) -> tuple[keras.Model, Any]:
    """A small GPT; in FP8 with all of its dense layers converted, small as they are."""
    with keras_mp.set_global_policy("mixed_bfloat16" if precision == "fp8" else precision):
        model = gpt(Size(2, 128, 2), 256, 32)
    if precision == "fp8":
        model = keras_mp.convert(model, select=lambda path, layer: True)
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = keras.KerasTensor((4, 32), "int32")
    return model, (tokens, tokens)


MODELS: dict[str, Callable[[str], tuple[keras.Model, Any]]] = {"digits": digits_step, "GPT": gpt_step}
STEPS = [
    Step(model, precision) for precision in PRECISIONS for model in MODELS if (model, precision) != ("digits", "fp8")
]


@cache
def lower(step: Step, chip: TracedChip) -> Lowered:
    """The lowered step of a GPU."""
    keras.utils.clear_session()
    model, batch = MODELS[step.model](step.precision)
    return lower_step(model, batch, training=True, chip=chip)


def kept(step: Step, lowered: Lowered, chip: Chip) -> tuple[int, int]:
    """How many products run in the dtype of the precision, and how many are asked for in it."""
    matmuls = join(compile_step(lowered, find_target(chip.name)))
    dtype = PRECISIONS[step.precision]
    asked = [matmul for matmul in matmuls if _all(matmul.asked, dtype)]
    return sum(_all(matmul.compiled, dtype) for matmul in asked), len(asked)


def _all(dtypes: tuple[str, ...], wanted: str) -> bool:
    return bool(dtypes) and all(dtype.startswith(wanted) for dtype in dtypes)


def has_hardware(chip: Chip, precision: str) -> bool:
    """Whether the GPU multiplies in the precision's dtype."""
    dtype = {"float8": "fp8"}.get(PRECISIONS[precision], PRECISIONS[precision])
    return support(dtype, Device("gpu", chip.title, chip.architecture, chip)).ok


def row(chip: Chip) -> str:
    """A line of the table."""
    cells = []
    for precision in PRECISIONS:
        texts = []
        for step in STEPS:
            if step.precision == precision and has_hardware(chip, precision):
                # Of the names of GPUs KerasHub alone asks, which has neither model.
                run, asked = kept(step, lower(step, traced(chip)._replace(kind="NVIDIA")), chip)
                texts.append(f"{step.model} {run} of {asked}")
        cells.append(", ".join(texts))
    return f"| {chip.title} (`{chip.name}`) | {chip.architecture} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="the file to write the table to")
    parser.add_argument("--only", default="", help="chips to compile for, separated by commas; all others are left out")
    arguments = parser.parse_args()
    wanted = [keras_mp.chips.find_chip(name).name for name in filter(None, arguments.only.split(","))]
    chips = [
        chip
        for chip in keras_mp.chips.CHIPS.values()
        if isinstance(chip.compiler, GpuDescription) and (not wanted or chip.name in wanted)
    ]
    lines = [
        "| GPU | compute capability | " + " | ".join(PRECISIONS) + " |",
        "| --- | ---: |" + " --- |" * len(PRECISIONS),
    ]
    for chip in chips:
        lines.append(row(chip))
        print(lines[-1], flush=True)
        if arguments.markdown:
            versions = ", ".join(
                f"{name} {text}"
                for name, text in installed(("jax", "jax-cuda13-plugin", "keras", "tensorflow")).items()
            )
            made = f"{datetime.date.today().isoformat()}, {keras.backend.backend()} backend, {versions}"
            write_text(HEADER.format(made=made) + "\n".join(lines) + "\n", arguments.markdown)


if __name__ == "__main__":
    main()
