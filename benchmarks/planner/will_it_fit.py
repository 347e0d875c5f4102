"""Where the bytes of a training step are, and what makes it fit: the figures of docs/will-it-fit.md.

    python benchmarks/planner/will_it_fit.py
    python benchmarks/planner/will_it_fit.py --only "GPT-2 XL"

Gemma 2B on four RTX 4090, as in keras-hub#1628, and GPT-2 XL on one TPU v5e and one T4, as Colab lends them. Models
have shapes and no values, and nothing runs. Weights and slots are exact; what the compiler adds is extrapolated from
steps with few of the blocks (`benchmarks/planner/by_blocks.py`). A step whose weights and slots alone are larger than
the memory is not compiled. What has been compiled once is kept (`KERAS_MP_CACHE`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import keras_hub

import keras_mp
from benchmarks.planner.by_blocks import inspect_by_blocks
from benchmarks.planner.published_models import GEMMA_2B, GPT2_XL
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.compile.lower import build_without_values, lower_step
from keras_mp.planner.fit.figures import memory_by_shapes
from keras_mp.planner.fit.measures import Measures
from keras_mp.reporting.text import byte_size
from models.gpt import gpt


class Case(NamedTuple):
    """One row: a model, its optimizer, and where it trains."""

    model: str
    optimizer: str
    precision: str
    target: str
    strategy: str
    batch: tuple[int, int]
    remat: bool = False


CASES = [
    *(
        Case("Gemma 2B", "AdamW", precision, "rtx4090x4", strategy, (4, 512))
        for strategy in ("data", "fully_sharded")
        for precision in ("float32", "mixed_bfloat16")
    ),
    *(
        Case("GPT-2 XL", optimizer, precision, target, "", (1, 1024), True)
        for target, precision in (("v5e", "mixed_bfloat16"), ("t4", "mixed_float16"))
        for optimizer in ("AdamW", "AdamW float8", "Lion", "Adafactor", "SGD")
    ),
]


def gemma_2b(case: Case, blocks: int) -> keras.Model:
    """Gemma 2B as KerasHub's language model, compiled to train."""
    model = keras_hub.models.GemmaCausalLM(keras_hub.models.GemmaBackbone(**GEMMA_2B | {"num_layers": blocks}), None)
    model.compile(optimizer_of(case, model), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def gpt2_xl(case: Case, blocks: int) -> keras.Model:
    """GPT-2 XL in the kit's lean layers, compiled to train."""
    model = gpt(GPT2_XL._replace(layers=blocks), length=case.batch[1], remat=case.remat)
    model.compile(optimizer_of(case, model), keras_mp.lean.ChunkedCrossEntropy())
    return model


def optimizer_of(case: Case, model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer, with the dtype of its states, and with a loss scale where the precision needs one."""
    name, _, state_dtype = case.optimizer.partition(" ")
    optimizer = getattr(keras.optimizers, name)(1e-4)
    return keras_mp.loss_scaling.wrap_optimizer(optimizer, model, state_dtype=state_dtype or "float32")


BUILDERS: dict[str, tuple[Callable[[Case, int], keras.Model], int]] = {
    "Gemma 2B": (gemma_2b, GEMMA_2B["num_layers"]),
    "GPT-2 XL": (gpt2_xl, GPT2_XL.layers),
}


def batch_of(case: Case) -> tuple:
    """Tokens and the next tokens, as shapes."""
    tokens = keras.KerasTensor(case.batch, "int32")
    if case.model == "Gemma 2B":
        return {"token_ids": tokens, "padding_mask": keras.KerasTensor(case.batch, "bool")}, tokens
    return tokens, tokens


def row(case: Case) -> str:
    """Compiles what needs to be, and writes a line of the table."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy(case.precision)
    builder, depth = BUILDERS[case.model]

    def build(blocks: int = depth) -> keras.Model:
        return builder(case, blocks)

    model, batch, place = build_without_values(build), batch_of(case), find_place(case.target)
    plan = place.plan(case.strategy)
    arguments = lower_step(model, batch, training=True, chip=place.traced).arguments
    state = memory_by_shapes(arguments, Measures(case.precision, strategy=case.strategy), plan, place.capacity)
    cells = [case.model, case.optimizer, case.precision, place.title, case.strategy or "one device"]
    cells += [byte_size(state.parameters), byte_size(state.optimizer)]
    if not state.fits:
        return _line(*cells, "not compiled", f"more than {byte_size(state.peak)}", "no", "shapes")
    strategy = {"strategy": case.strategy} if case.strategy else {}
    report = inspect_by_blocks(build, batch, case.target, **strategy)
    memory = report.memory
    assert memory.parameters + memory.optimizer == state.parameters + state.optimizer
    verdict = "yes" if memory.fits else "no"
    share = f"{verdict}, {memory.peak / memory.capacity:.0%}"
    print(report.memory.largest[:6], f"compiled in {report.seconds:.0f} s", flush=True)
    return _line(*cells, byte_size(memory.temporary), byte_size(memory.peak), share, report.extrapolated)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="rows whose model, optimizer, precision, target or strategy hold this"
    )
    arguments = parser.parse_args()
    print(
        "| model | optimizer | precision | devices | strategy | weights | slots | temporary | peak | fits | from |\n"
        f"|{' --- |' * 11}"
    )
    for case in CASES:
        if arguments.only in " ".join(map(str, case)):
            print(row(case), flush=True)


if __name__ == "__main__":
    main()
