"""A step of a large model: gradients that wait for all others or for none, states on the host, and LoRA.

    KERAS_BACKEND=jax python benchmarks/released.py --blocks 4 --vocabulary 32000 --chip rtx4090
    KERAS_BACKEND=jax python benchmarks/released.py --blocks 4 8 --rows 2 --loss logits chunked --form host
    KERAS_BACKEND=jax python benchmarks/released.py --rows 2 --form lora
    KERAS_BACKEND=jax python benchmarks/released.py --model gpt2-xl --form host --policy mixed_bfloat16 \\
        --states float32 --length 1024 --chip v5e
    KERAS_BACKEND=tensorflow python benchmarks/released.py --here

All but the last compile for a chip that is not attached, until memory is assigned: with AdamW, blocks recomputed, all
of them where no number is given. They print what the compiler assigned (of a TPU without the program itself), the bytes
on the host, how long these take each way at the chip's link, and the time of the step; of two numbers of blocks also
the line through them at all. Weights are bfloat16 and states in 8 bits where nothing else is said; LoRA is of rank 8 on
all Dense layers, under mixed_bfloat16 and with the frozen base in 16 bits. `--here` trains 8 dense layers of 64 MiB in
float32 on this machine, a process for each form, and prints the most memory that it had.
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
from benchmarks.planner.published_models import GEMMA_2B, GPT2_XL
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.lower import build_without_values, lower_step
from keras_mp.planner.inspect import report_of
from keras_mp.rebuild import layers_by_path
from models.gpt import gpt
from models.llama import SIZES, llama

GIB = 2**30
RELEASED = {"release_gradients": True}
FORMS = {
    "checked": {},
    "released": RELEASED,
    "host": RELEASED | {"state_memory": "host"},
    "lora": {"narrow_frozen": True},
}
RANK = 8
# Mistral 7B (Jiang et al. 2023, table 1) has the sizes of Llama 3 8B but for its vocabulary, and attends to all of 2048
# tokens.
DEPTHS = {"llama3-8b": 32, "mistral-7b": 32, "gemma-2b": 18, "gpt2-xl": 48}
TOKENS = {"llama3-8b": 128256, "mistral-7b": 32000, "gemma-2b": 256000, "gpt2-xl": 50257}


def model_of(name: str, blocks: int, vocabulary: int, length: int) -> keras.Model:
    """A model whose blocks are recomputed."""
    if name == "gpt2-xl":
        return gpt(GPT2_XL._replace(layers=blocks), vocabulary=vocabulary, length=length, remat=True)
    if name == "gemma-2b":
        import keras_hub

        sizes = GEMMA_2B | {"num_layers": blocks, "vocabulary_size": vocabulary}
        model = keras_hub.models.GemmaCausalLM(keras_hub.models.GemmaBackbone(**sizes), None)
        return keras_mp.lean.make_lean(model, remat=True)
    return llama(SIZES["llama3-8b"]._replace(layers=blocks, vocabulary=vocabulary), length=length, remat=True)


def compiled(form: str, blocks: int, loss: str, options: argparse.Namespace) -> dict[str, float]:
    """What the compiler of a chip assigns, in GiB, and seconds: of states on the host each way, and of the step."""
    losses = {
        "chunked": keras_mp.lean.ChunkedCrossEntropy,
        "logits": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }

    def build() -> keras.Model:
        model = model_of(options.model, blocks, options.vocabulary, options.length)
        for layer in layers_by_path(model).values() if form == "lora" else []:
            if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
                layer.enable_lora(RANK)
            elif isinstance(layer, keras.layers.Embedding):
                layer.trainable = False
        states = {} if form == "lora" else {"state_dtype": options.states}
        return keras_mp.prepare(model, keras.optimizers.AdamW(1e-4), losses[loss](), **states, **FORMS[form])

    keras_mp.set_global_policy("mixed_bfloat16" if form == "lora" else options.policy)
    tokens = keras.KerasTensor((options.rows, options.length), "int32")
    x = tokens
    if options.model == "gemma-2b":
        x = {"token_ids": tokens, "padding_mask": keras.KerasTensor(tokens.shape, "bool")}
    target = find_target(options.chip)
    step = lower_step(build_without_values(build), (x, tokens), training=True, chip=target.traced)
    report = report_of(step, target, options.policy, until="memory")
    memory, link = report.memory, target.chip.host_link
    sizes = ("arguments", "temporary", "peak", "gradients", "host", "capacity")
    seconds = {"each_way": memory.host / link.bandwidth if link else 0.0}
    times = {"bound": report.roofline, "predicted": report.time}
    seconds |= {name: time.seconds if time else float("nan") for name, time in times.items()}
    return {name: getattr(memory, name) / GIB for name in sizes} | seconds


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
    parser.add_argument("--model", default="llama3-8b", choices=DEPTHS)
    parser.add_argument("--blocks", nargs="+", type=int, help="of the model's blocks so many; by default all")
    parser.add_argument("--vocabulary", type=int, help="by default the model's")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--policy", default="bfloat16", choices=("bfloat16", "mixed_bfloat16"))
    parser.add_argument("--states", default="float8", choices=("float32", "bfloat16", "float8"))
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
    depth = DEPTHS[options.model]
    options.blocks = options.blocks or [depth]
    options.vocabulary = options.vocabulary or TOKENS[options.model]
    for loss in options.loss:
        for form in options.form:
            peaks = []
            for blocks in options.blocks:
                started = time.monotonic()
                sizes = compiled(form, blocks, loss, options)
                peaks.append(sizes["peak"])
                crossing = f", {sizes['each_way'] * 1e3:.0f} ms each way" if sizes["each_way"] else ""
                print(
                    f"{options.model}, {options.chip}, {blocks} blocks, {options.rows} x {options.length}, vocabulary "
                    f"{options.vocabulary}, {options.policy}, states {options.states}, {loss}, {form}: "
                    f"{sizes['arguments']:.2f} + {sizes['temporary']:.2f}, peak {sizes['peak']:.2f} of "
                    f"{sizes['capacity']:.2f} GiB; gradients at once {sizes['gradients']:.2f}, on the host "
                    f"{sizes['host']:.2f}{crossing}; a step {sizes['bound']:.2f} s at peak rates, "
                    f"{sizes['predicted']:.2f} s predicted; {time.monotonic() - started:.0f} s to compile",
                    flush=True,
                )
            if len(peaks) == 2:
                first, second = options.blocks
                line = peaks[0] + (peaks[1] - peaks[0]) / (second - first) * (depth - first)
                print(f"{options.model}, {options.chip}, {loss}, {form}: {line:.2f} GiB with {depth} blocks, on the "
                      "line through both")  # fmt: skip


if __name__ == "__main__":
    main()
