"""The update of one weight of 8192 x 8192 by AdamW, compiled here: what small states cost beside Keras's optimizer.

    python benchmarks/small_states_update.py

The gradient comes in bfloat16. Bytes are what lies in memory between two steps, without the gradient. Cycles are the
TPU compiler's own estimate, of those of Keras's AdamW: of the update alone, and with the check that all gradients are
finite, which `LossScaleOptimizer` makes for every `state_dtype`, and which a whole step makes where a gradient is
computed. Nothing runs.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import keras

import keras_mp
from keras_mp import backend
from keras_mp.backend.common.device import traced_for
from keras_mp.backend.common.lowered import Lowered
from keras_mp.xla.compile import compile_step
from keras_mp.xla.targets import find_target

SIDE = 8192
ROWS = (
    ("Keras's AdamW", "float32", None),
    ("states in float32", "float32", "float32"),
    ("states in bfloat16", "float32", "bfloat16"),
    ("states in float8", "float32", "float8"),
    ("states in float8, weights in bfloat16", "bfloat16", "float8"),
)


def lowered(dtype: str, state_dtype: str | None, platform: str, checked: bool) -> tuple[Lowered, int]:
    """The update, and the bytes that it keeps."""
    with backend.no_allocation():
        weight = keras.Variable(shape=(SIDE, SIDE), initializer="zeros", dtype=dtype)
        optimizer: Any = keras.optimizers.AdamW(1e-3)
        if state_dtype is not None:
            optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.NoLossScale(), state_dtype=state_dtype)
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

    with traced_for(platform):
        traced = jax.jit(update, donate_argnums=(0, 1)).trace(weights, slots, gradient)
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    text = io.BytesIO()
    module.operation.write_bytecode(text)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in [*weights, *slots])
    return Lowered(text.getvalue(), (), (), "jax", "update"), kept


def cycles(dtype: str, state_dtype: str | None, target: str, checked: bool) -> int:
    """The compiler's estimate, added up over the kernels."""
    step, _ = lowered(dtype, state_dtype, "tpu", checked)
    return sum(map(int, re.findall(r'estimated_cycles":"?(\d+)', compile_step(step, find_target(target)).hlo)))


def main() -> None:
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
        memory = compile_step(step, find_target("h100")).described["memory"]
        cells.append(f"{memory['temp'] / SIDE**2:.2f}")
        print(f"| {name} | {kept / SIDE**2:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
