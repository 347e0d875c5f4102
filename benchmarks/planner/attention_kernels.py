"""GPT, BERT and ViT with attention's kernels, as `inspect` compiles them for chips that are not there.

    python benchmarks/planner/attention_kernels.py
    python benchmarks/planner/attention_kernels.py --only BERT,v5e
    python benchmarks/planner/attention_kernels.py --markdown docs/tables/attention-kernels.md

Two blocks of the published width, whole training steps with AdamW in mixed_bfloat16, stabilized: once with scores in
memory (`keras.config.disable_flash_attention()`), which is what `inspect` compiled for such chips before it traced a
step for them, and once as the chip runs it: Splash on TPUs, cuDNN's attention on an H100.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras

import keras_mp
from benchmarks.plain_models import plain_gpt
from benchmarks.results import make_table
from keras_mp.lowering import lower_step
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.inspect import report_on
from keras_mp.planner.report.compile_report import CompileReport

TARGETS = ("v5e", "v6e", "h100")
COLUMNS = ("", "chip", "kernels", "products", "temporary", "predicted", "at the least", "scores in memory: temporary",
           "predicted")  # fmt: skip


def _gpt() -> tuple[keras.Model, Any]:
    tokens = keras.KerasTensor((8, 1024), "int32")
    return plain_gpt(2, 768, 12, 50304, 1024), (tokens, tokens)


def _bert() -> tuple[keras.Model, Any]:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(30522, 2, 12, 768, 3072, dropout=0.0, max_sequence_length=512)
    model = keras_hub.models.BertTextClassifier(backbone, 2, preprocessor=None)
    inputs = {name: keras.KerasTensor((32, 512), "int32") for name in ("token_ids", "segment_ids", "padding_mask")}
    return model, (inputs, keras.KerasTensor((32,), "int32"))


def _vit() -> tuple[keras.Model, Any]:
    import keras_hub

    shape = 256, 256, 3
    backbone = keras_hub.models.ViTBackbone(shape, (16, 16), 2, 12, 768, 3072, use_class_token=False)
    pooled = keras.layers.GlobalAveragePooling1D()(backbone.output)
    model = keras.Model(backbone.input, keras.layers.Dense(1000, dtype="float32")(pooled))
    return model, (keras.KerasTensor((64, *shape)), keras.KerasTensor((64,), "int32"))


MODELS: dict[str, Callable[[], tuple[keras.Model, Any]]] = {
    "GPT, 8 x 1,024 tokens": _gpt,
    "BERT without dropout, 32 x 512 tokens": _bert,
    "ViT, 64 x 256 patches": _vit,
}


def inspected(name: str, target: str, *, kernels: bool) -> CompileReport:
    """The report on a step, with attention's kernels or with scores in memory."""
    keras.utils.clear_session()
    (keras.config.enable_flash_attention if kernels else keras.config.disable_flash_attention)()
    try:
        with keras_mp.set_global_policy("mixed_bfloat16"):
            model, batch = MODELS[name]()
        model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        chip = find_target(target)
        step = lower_step(keras_mp.stabilize(model), batch, training=True, chip=chip.traced)
        # A TPU's kernels and their order are known when its compiler has assigned memory.
        return report_on(compile_step(step, chip, until="memory"), "mixed_bfloat16")
    finally:
        keras.config.enable_flash_attention()


def row(name: str, target: str) -> str:
    """A line of the table."""
    with_kernels, without = (inspected(name, target, kernels=kernels) for kernels in (True, False))
    ran = [matmul for matmul in with_kernels.matmuls if matmul.compiled]
    mine = [matmul for matmul in ran if matmul.kind == "kernel"]
    share = sum(matmul.flops for matmul in mine) / with_kernels.flops
    assert with_kernels.time and with_kernels.roofline and without.time
    cells = [name, with_kernels.title, f"{len(mine)}, {share:.0%} of the operations" if mine else "none",
             f"{len(ran)} of {len(with_kernels.matmuls)}", _gib(with_kernels), _ms(with_kernels.time.seconds),
             _ms(with_kernels.roofline.seconds), _gib(without), _ms(without.time.seconds)]  # fmt: skip
    return "| " + " | ".join(cells) + (f" | {with_kernels.error}" if with_kernels.error else "") + " |"


def _gib(report: CompileReport) -> str:
    return f"{report.memory.temporary / 2**30:.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models or chips whose names hold one of these, separated by commas")
    parser.add_argument("--markdown", type=Path, help="the page to write the table to")
    options = parser.parse_args()
    wanted = options.only.lower().split(",")
    pairs = itertools.product(MODELS, TARGETS)
    asked = (pair for pair in pairs if any(part in " ".join(pair).lower() for part in wanted))
    make_table(COLUMNS, 3, itertools.starmap(row, asked), "planner/attention_kernels.py", options.markdown)


if __name__ == "__main__":
    main()
