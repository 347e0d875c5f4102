"""How far the line through a step with few blocks, and one with more, is from the step with many more.

    KERAS_BACKEND=jax python benchmarks/planner/depths.py        # 10 minutes on 2 cores

Compiles Llama 3 8B, fully sharded over 8 H100 with each block recomputed, with 2, 4 and 8 of its 32 blocks. The line
through the first two, as `benchmarks/planner/by_blocks.py` draws it, gives a time and a memory of 8 blocks; the step
with 8 blocks is compiled too. Writes depths.json, which the page of predictions reads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

KEPT = Path(__file__).with_name("depths.json")
CHIP, CHIPS, BLOCKS, DEEPER, LENGTH = "h100", 8, (2, 4), 8, 8192
FIGURES = ("time", "products", "other", "uncovered", "bound", "memory", "temporary")


def build(blocks: int = DEEPER) -> Any:
    """The model with so many blocks, compiled for training."""
    import keras

    import keras_mp
    from models.llama import LlamaSize, llama

    model = llama(LlamaSize(blocks, 4096, 32, 8, 14336, 128256, theta=500000.0), LENGTH, remat=True)
    model.compile(keras.optimizers.AdamW(1e-4), keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
    return model


def figures(report: Any) -> dict[str, float]:
    """What is compared: seconds, and bytes of a device."""
    time, memory = report.time, report.memory
    values = (time.seconds, time.products, time.other, time.uncovered, report.roofline.seconds, memory.peak)
    return dict(zip(FIGURES, (*values, memory.temporary), strict=True))


def main() -> None:
    import keras

    import keras_mp
    from benchmarks.planner.by_blocks import inspect_by_blocks

    tokens = keras.KerasTensor((CHIPS, LENGTH), "int32")
    target, strategy = f"{CHIP}x{CHIPS}", "fully_sharded"
    with keras_mp.set_global_policy("mixed_bfloat16"):
        line = figures(inspect_by_blocks(build, (tokens, tokens), target, blocks=BLOCKS, strategy=strategy))
        whole = figures(keras_mp.inspect(build, (tokens, tokens), target, strategy=strategy))
    KEPT.write_text(json.dumps({"blocks": [*BLOCKS, DEEPER], "line": line, "compiled": whole}, indent=1) + "\n")
    for name in FIGURES:
        print(f"{name}: {line[name]:.4g} on the line, {whole[name]:.4g} compiled, {line[name] / whole[name] - 1:+.1%}")


if __name__ == "__main__":
    main()
