"""A step of Llama 3 8B: in full with gradients that wait for all others or for none, with states on the host, and LoRA.

    KERAS_BACKEND=jax python benchmarks/released.py --blocks 4 --vocabulary 32000 --chip rtx4090
    KERAS_BACKEND=jax python benchmarks/released.py --blocks 4 8 --rows 2 --loss logits chunked --form host
    KERAS_BACKEND=jax python benchmarks/released.py --blocks 32 --rows 2 --loss logits --form lora
    KERAS_BACKEND=tensorflow python benchmarks/released.py --here

The first three compile for a chip that is not attached, weights in bfloat16, AdamW with states in 8 bits, blocks
recomputed (LoRA: mixed_bfloat16, rank 8 on all Dense layers, the frozen base in 16 bits), and print what the compiler
assigned; of two numbers of blocks also the line through them at 32. `--here` trains 8 dense layers of 64 MiB in float32
on this machine, a process for each form, and prints the most memory that the process had.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
import numpy as np

import keras_mp
from keras_mp.rebuild import layers_by_path
from models.llama import SIZES, llama

GIB = 2**30
LENGTH = 2048
IN_8_BITS = {"state_dtype": "float8"}
RELEASED = IN_8_BITS | {"release_gradients": True}
FORMS = {
    "checked": IN_8_BITS,
    "released": RELEASED,
    "host": RELEASED | {"state_memory": "host"},
    "lora": {"narrow_frozen": True},
}
RANK = 8


def compiled(form: str, blocks: int, vocabulary: int, rows: int, loss: str, chip: str) -> dict[str, float]:
    """What the compiler of a chip assigns, in GiB."""
    losses = {
        "chunked": keras_mp.lean.ChunkedCrossEntropy,
        "logits": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }

    def build() -> keras.Model:
        size = SIZES["llama3-8b"]._replace(layers=blocks, vocabulary=vocabulary)
        model = llama(size, length=LENGTH, remat=True)
        for layer in layers_by_path(model).values() if form == "lora" else []:
            if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
                layer.enable_lora(RANK)
            elif isinstance(layer, keras.layers.Embedding):
                layer.trainable = False
        return keras_mp.prepare(model, keras.optimizers.AdamW(1e-4), losses[loss](), **FORMS[form])

    keras_mp.set_global_policy("mixed_bfloat16" if form == "lora" else "bfloat16")
    tokens = keras.KerasTensor((rows, LENGTH), "int32")
    report = keras_mp.inspect(build, (tokens, tokens), target=chip)
    memory = report.memory
    sizes = ("arguments", "temporary", "peak", "gradients", "host")
    return {name: getattr(memory, name) / GIB for name in sizes} | {"capacity": memory.capacity / GIB}


def trained_here(form: str) -> dict[str, float]:
    """Trains on this machine, and returns the process's largest memory in GiB, before the step and in all."""
    width = 4096
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((width,)), *(keras.layers.Dense(width, use_bias=False) for _ in "12345678")]
    )
    release = "release_gradients" in FORMS[form]
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(1e-3), keras_mp.LossScale.none(release_gradients=release)
    )
    model.compile(optimizer, "mse", jit_compile=os.environ.get("JIT") == "1")
    x = np.ones((8, width), "float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        model.train_on_batch(x, x)
    return {"before": before / 2**20, "largest": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def main() -> None:
    """Prints a line for each form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", nargs="+", type=int, default=[4])
    parser.add_argument("--vocabulary", type=int, default=SIZES["llama3-8b"].vocabulary)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--loss", nargs="+", default=["chunked"], choices=("chunked", "logits"))
    parser.add_argument("--form", nargs="+", default=["checked", "released", "host"], choices=FORMS)
    parser.add_argument("--chip", default="rtx4090")
    parser.add_argument("--here", action="store_true", help="trains on this machine instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(trained_here(options.one)))
        return
    if options.here:
        for jit in ("0", "1"):
            for form in ("checked", "released"):
                command = [sys.executable, __file__, "--one", form]
                done = subprocess.run(
                    command, env=os.environ | {"JIT": jit}, capture_output=True, text=True, check=True
                )
                sizes = json.loads(done.stdout.splitlines()[-1])
                print(f"{'jitted' if jit == '1' else 'not jitted'}, {form}: {sizes['before']:.2f} GiB before the first "
                      f"step, {sizes['largest']:.2f} at most", flush=True)  # fmt: skip
        return
    for loss in options.loss:
        for form in options.form:
            peaks = []
            for blocks in options.blocks:
                started = time.monotonic()
                sizes = compiled(form, blocks, options.vocabulary, options.rows, loss, options.chip)
                peaks.append(sizes["peak"])
                print(
                    f"{options.chip}, {blocks} blocks, {options.rows} x {LENGTH}, vocabulary {options.vocabulary}, "
                    f"{loss}, {form}: {sizes['arguments']:.2f} + {sizes['temporary']:.2f}, peak {sizes['peak']:.2f} of "
                    f"{sizes['capacity']:.2f} GiB; gradients at once {sizes['gradients']:.2f}, on the host "
                    f"{sizes['host']:.2f}; {time.monotonic() - started:.0f} s",
                    flush=True,
                )
            if len(peaks) == 2:
                first, second = options.blocks
                line = peaks[0] + (peaks[1] - peaks[0]) / (second - first) * (32 - first)
                print(f"{options.chip}, {loss}, {form}: {line:.2f} GiB with 32 blocks, on the line through both")


if __name__ == "__main__":
    main()
