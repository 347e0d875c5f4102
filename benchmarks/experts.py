"""The chosen experts only, beside KerasHub's own code: time on this CPU; compiled for chips that are not there.

    KERAS_BACKEND=tensorflow python benchmarks/experts.py cpu      # or jax
    KERAS_BACKEND=tensorflow python benchmarks/experts.py losses   # or jax
    python benchmarks/experts.py compiled --only qwen3_moe,h100
    python benchmarks/experts.py compiled --markdown docs/tables/lean-models.md

`cpu` times whole training steps of one decoder, both in turn, three rounds. `losses` trains a small language model for
50 steps by each. `compiled` inspects a training step of one decoder of each family at its published sizes, 4,096
tokens, in mixed_bfloat16 with plain SGD; all else is lean in both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import keras_hub
import numpy as np

import keras_mp
from benchmarks.results import make_table
from keras_mp.lean.expert_blocks import EXPERTS
from keras_mp.lowering import Source
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.inspect import report_on
from keras_mp.precision.policy import pays
from keras_mp.system.host import cpu_name
from keras_mp.treatment.change import undo

LENGTH = 4096
_ONE = {"vocabulary_size": 1024, "num_layers": 1}
# By the family's name: the published model, the backbone's class, and its sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral 8x7B", "MixtralBackbone", {
        "num_query_heads": 32, "num_key_value_heads": 8, "hidden_dim": 4096, "intermediate_dim": 14336,
        "num_experts": 8, "top_k": 2,
    }),
    "qwen_moe": ("Qwen1.5-MoE-A2.7B", "QwenMoeBackbone", {
        "num_query_heads": 16, "num_key_value_heads": 16, "hidden_dim": 2048, "intermediate_dim": 5632,
        "moe_intermediate_dim": 1408, "shared_expert_intermediate_dim": 5632, "num_experts": 60, "top_k": 4,
    }),
    "qwen3_moe": ("Qwen3-30B-A3B", "Qwen3MoeBackbone", {
        "num_query_heads": 32, "num_key_value_heads": 4, "hidden_dim": 2048, "head_dim": 128, "intermediate_dim": 6144,
        "moe_intermediate_dim": 768, "num_experts": 128, "top_k": 8, "norm_top_k_prob": True,
    }),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B", "Qwen3_5MoeBackbone", {
        "num_query_heads": 16, "num_key_value_heads": 2, "hidden_dim": 2048, "head_dim": 256,
        "moe_intermediate_dim": 512, "shared_expert_intermediate_size": 512, "num_experts": 256, "top_k": 8,
        "layer_types": ["full_attention"],
    }),
    "gpt_oss": ("gpt-oss-20b", "GptOssBackbone", {
        "num_query_heads": 64, "num_key_value_heads": 8, "hidden_dim": 2880, "head_dim": 64, "intermediate_dim": 2880,
        "num_experts": 32, "top_k": 4, "sliding_window": 128,
    }),
    "gemma4": ("Gemma 4 26B-A4B", "Gemma4Backbone", {
        "num_query_heads": 16, "num_key_value_heads": 8, "hidden_dim": 2816, "head_dim": 256, "intermediate_dim": 2112,
        "image_size": None, "enable_moe_block": True, "num_experts": 128, "expert_intermediate_dim": 704,
        "num_experts_per_token": 8,
    }),
}  # fmt: skip
SMALL = {
    "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 256, "head_dim": 64, "intermediate_dim": 256,
    "moe_intermediate_dim": 128, "num_experts": 32, "top_k": 4, "norm_top_k_prob": True,
}  # fmt: skip
COLUMNS = ("one decoder of", "chip", "own code: temporary", "operations", "predicted",
           "chosen only: temporary", "operations", "predicted")  # fmt: skip


def model_of(backbone: str, sizes: dict[str, Any], *, chosen_only: bool) -> keras.Model:
    """A model of one decoder, all else lean as well."""
    layers = getattr(keras_hub.models, backbone)(**_ONE, **sizes)
    model = keras.Model(layers.inputs, layers.output)
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    keras_mp.lean.make_lean(model)
    if not chosen_only:
        undo(model, (EXPERTS,))
    return model


def compiled(family: str, target: str) -> str:
    """A line of the table."""
    title, backbone, sizes = FAMILIES[family]
    chip = find_target(target)
    cells = [title, chip.title]
    tokens = keras.KerasTensor((1, LENGTH), "int32")
    names = ["token_ids", "padding_mask", *(["position_ids"] if family == "gemma4" else [])]
    batch = dict.fromkeys(names, tokens), keras.KerasTensor((1, LENGTH, sizes["hidden_dim"]))
    for chosen_only in (False, True):

        def build(chosen_only: bool = chosen_only) -> keras.Model:
            keras_mp.set_global_policy("mixed_bfloat16")
            return model_of(backbone, sizes, chosen_only=chosen_only)

        # As `inspect` does, but that a TPU's compiler, which needs half an hour for code, ends at the memory.
        step = Source(build).lower(batch, chip.traced)
        report = report_on(compile_step(step, chip, until="memory"), "mixed_bfloat16")
        seconds = f"{report.time.seconds * 1e3:.1f} ms" if report.time else report.error or "-"
        cells += [f"{report.memory.temporary / 2**30:.2f} GiB", f"{report.flops / 1e12:.2f} TFLOP", seconds]
    return "| " + " | ".join(cells) + " |"


def cpu() -> None:
    """Prints the times of whole steps of a small decoder, own code and chosen only in turn."""
    print(f"{cpu_name()}, {keras.backend.backend()}: Qwen3-MoE, one decoder, 32 experts, 4 chosen, 2,048 tokens")
    x = {
        "token_ids": np.random.default_rng(0).integers(0, 1024, (2, 1024)),
        "padding_mask": np.ones((2, 1024), "int32"),
    }
    y = np.zeros((2, 1024, SMALL["hidden_dim"]), "float32")
    for policy in ("float32", *(["mixed_bfloat16"] if pays("mixed_bfloat16").ok else [])):
        keras.config.set_dtype_policy(policy)
        models = [model_of("Qwen3MoeBackbone", SMALL, chosen_only=chosen_only) for chosen_only in (False, True)]
        models[1].set_weights(models[0].get_weights())
        for model in models:
            model.jit_compile = keras.backend.backend() == "jax"
            keras_mp.stabilize(model)
            model.train_on_batch(x, y)
        rounds = []
        for _ in range(3):
            times = []
            for model in models:
                started = time.perf_counter()
                for _ in range(2):
                    float(model.train_on_batch(x, y))
                times.append((time.perf_counter() - started) / 2)
            rounds.append(times)
        own, chosen = (statistics.median(times) * 1e3 for times in zip(*rounds, strict=True))
        ratio = statistics.median(times[0] / times[1] for times in rounds)
        print(f"{policy}: own code {own:.0f} ms, chosen only {chosen:.0f} ms, {ratio:.2f} times as fast", flush=True)


def losses() -> None:
    """Prints the losses of 50 steps of a small Qwen3-MoE, own code and chosen only, from the same weights."""
    sizes = {**SMALL, "vocabulary_size": 64, "num_layers": 2, "hidden_dim": 64, "head_dim": 16, "num_experts": 16}
    tokens = np.random.default_rng(0).integers(1, 64, (8, 33))
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((8, 32), "int32")}
    runs = []
    for chosen_only in (False, True):
        keras.utils.set_random_seed(0)
        model = keras_hub.models.Qwen3MoeCausalLM(
            backbone=keras_hub.models.Qwen3MoeBackbone(**sizes), preprocessor=None
        )
        model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if chosen_only:
            keras_mp.lean.make_lean(model)
        runs.append([model.train_on_batch(x, tokens[:, 1:], return_dict=True)["loss"] for _ in range(50)])
    print(f"{keras.backend.backend()}, steps 1, 10, 20, 30, 40, 50:")
    for name, run in zip(("own code", "chosen only"), runs, strict=True):
        print(f"{name}: {', '.join(f'{run[step]:.5f}' for step in (0, 9, 19, 29, 39, 49))}")
    print(f"largest difference: {np.max(np.abs(np.subtract(*runs))):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "losses", "compiled"))
    parser.add_argument("--only", default="", help="parts of the names of a family and a chip, by commas")
    parser.add_argument("--markdown", type=Path, help="the page to write the table to")
    options = parser.parse_args()
    if options.what != "compiled":
        return cpu() if options.what == "cpu" else losses()
    wanted = [
        (family, target)
        for target in ("h100", "v5e")
        for family in FAMILIES
        if all(part in f"{family} {target}" for part in options.only.split(","))
    ]
    make_table(COLUMNS, 2, itertools.starmap(compiled, wanted), "experts.py", options.markdown)


if __name__ == "__main__":
    main()
