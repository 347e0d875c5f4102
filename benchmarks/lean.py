"""What the lean parts save: memory of GPT-2 124M on an H100, and the time of a small GPT's step on this CPU.

    python benchmarks/lean.py memory --backend jax --model lean
    python benchmarks/lean.py memory --backend tensorflow --model lean --remat
    python benchmarks/lean.py memory --backend jax --model plain --precision float32
    python benchmarks/lean.py llama --model kit --remat
    python benchmarks/lean.py time --steps 30

`memory` compiles the whole training step, with AdamW, for batch 8 x 1024, and prints the compiler's figure for what it
needs besides weights, optimizer and batch, with the largest arrays. `llama` does so for Llama 3.2 1B on 1 x 2048
tokens, the kit's or KerasHub's made lean, from steps with 4 and 8 of the 16 blocks. `time` runs a step of the plain
and of the lean model in turn, on TensorFlow without jit, in mixed_bfloat16: width 384, 6 layers, 6 heads, batch 8 x
256, vocabulary 256; and, where torch is installed, of the same model in PyTorch, eager, under autocast to bfloat16.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def compiled(model: str, sizes: tuple[int, int, int, int, int], remat: bool, jit: bool):
    import keras

    import keras_mp
    from benchmarks.plain_models import plain_gpt
    from models.gpt import gpt
    from models.transformer import Size

    keras.utils.set_random_seed(0)
    if model == "plain":
        network, loss = plain_gpt(*sizes), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        network = gpt(Size(*sizes[:3]), sizes[3], sizes[4], remat=remat)
        loss = keras_mp.ChunkedCrossEntropy()
    network.compile(keras.optimizers.AdamW(3e-4), loss, jit_compile=jit)
    return network


def memory(options: argparse.Namespace) -> None:
    import keras

    import keras_mp

    keras.config.set_dtype_policy(options.precision)
    tokens = keras.KerasTensor((8, 1024), "int32")
    sizes = (12, 768, 12, 50304, 1024)
    report = keras_mp.inspect(lambda: compiled(options.model, sizes, options.remat, True), (tokens, tokens), "h100")
    memory_used = report.memory
    print(f"| {options.model}{' with remat' if options.remat else ''} | {report.backend} | {options.precision} | "
          f"{memory_used.temporary / 2**30:.2f} | {memory_used.peak / 2**30:.2f} |")  # fmt: skip
    for buffer in memory_used.largest[: options.buffers]:
        print(f"  {buffer.bytes / 2**20:.0f} MiB {buffer.dtype}{list(buffer.shape)} {buffer.what} of {buffer.layer}")


def llama_memory(options: argparse.Namespace) -> None:
    import keras

    import keras_mp
    from keras_mp.xla.extrapolate import inspect_by_blocks
    from models.llama import SIZES, llama

    size = SIZES["llama3.2-1b"]

    def build() -> keras.Model:
        if options.model == "hub":
            import keras_hub.models as hub

            backbone = hub.Llama3Backbone(
                vocabulary_size=size.vocabulary, num_layers=size.layers, num_query_heads=size.heads,
                num_key_value_heads=size.key_heads, hidden_dim=size.width, intermediate_dim=size.hidden,
                rope_max_wavelength=size.theta, tie_word_embeddings=size.tied,
            )  # fmt: skip
            model = keras_mp.make_lean(hub.Llama3CausalLM(backbone=backbone, preprocessor=None), remat=options.remat)
        else:
            model = llama(size, 2048, options.remat)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(3e-4), loss, jit_compile=True)
        return model

    keras.config.set_dtype_policy(options.precision)
    tokens = keras.KerasTensor((1, 2048), "int32")
    x = {"token_ids": tokens, "padding_mask": tokens} if options.model == "hub" else tokens
    report = inspect_by_blocks(build, (x, tokens), "h100")
    used = report.memory
    print(f"| {options.model}{' with remat' if options.remat else ''} | {report.backend} | {options.precision} | "
          f"{used.temporary / 2**30:.2f} | {used.peak / 2**30:.2f} | {report.extrapolated}")  # fmt: skip


def pytorch_step(sizes: tuple[int, int, int, int, int], text):
    """The same training step in PyTorch, as a function; None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    from peer_pytorch import Gpt
    from torch.nn import functional

    network = Gpt(*sizes)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-4)
    inputs, targets = torch.from_numpy(text[:, :-1].copy()), torch.from_numpy(text[:, 1:].copy())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(inputs)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def step_time(options: argparse.Namespace) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_bfloat16")
    sizes = (6, 384, 6, 256, 256)
    text = np.random.default_rng().integers(0, 256, (8, 257))
    batch = tf.constant(text[:, :-1], tf.int32), tf.constant(text[:, 1:], tf.int32)
    models = {name: compiled(name, sizes, False, False) for name in ("plain", "lean")}
    runs = {name: partial(model.train_on_batch, *batch) for name, model in models.items()}
    pytorch = pytorch_step(sizes, text)
    if pytorch:
        runs["PyTorch autocast"] = pytorch
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(options.steps + 3):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if step >= 3:
                seconds[name].append(time.perf_counter() - started)
    for name, measured in seconds.items():
        print(f"{name}: median {statistics.median(measured) * 1e3:.0f} ms, least {min(measured) * 1e3:.0f} ms")
    for name in seconds.keys() - {"lean"}:
        # Steps that ran one after the other met the same load.
        ratio = statistics.median(lean / other for lean, other in zip(seconds["lean"], seconds[name], strict=True))
        least = min(seconds["lean"]) / min(seconds[name])
        print(f"lean / {name}: {ratio:.2f} median of pairs, {least:.2f} of the least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "llama", "time"))
    parser.add_argument("--backend", default="jax", choices=("tensorflow", "jax"))
    parser.add_argument("--model", default="lean", choices=("plain", "lean", "kit", "hub"))
    parser.add_argument("--precision", default="mixed_bfloat16")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--buffers", type=int, default=3, help="how many of the largest arrays to print")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["KERAS_BACKEND"] = "tensorflow" if options.what == "time" else options.backend
    {"memory": memory, "llama": llama_memory, "time": step_time}[options.what](options)


if __name__ == "__main__":
    main()
