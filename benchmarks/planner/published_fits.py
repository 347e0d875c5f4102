"""Steps that are known to have run on a chip, or to have run out of its memory, to score the word "fits".

A step is taken if its source names the model, the batch of a device, the precision, the chip, and how it ended; a batch
of which the author's program says itself that the next larger one ran out of memory counts as both. Rules 1 and 3 to 6
of published_runs.py hold, but for the division over devices and the optimizer, where the row says how it differs. None
is dropped after it was compiled. `python benchmarks/planner/predictions.py --fits` compiles those that are not in
predictions.json, to the stage at which the compiler has assigned memory.
"""

from __future__ import annotations

from typing import NamedTuple

GITHUB = "https://github.com"
TRANSFORMERS = f"{GITHUB}/huggingface/transformers/issues"
LIT = f"{GITHUB}/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
LIT_HUB = f"{GITHUB}/Lightning-AI/litgpt/blob/main/config_hub/finetune/README.md"
TIMM = f"{GITHUB}/huggingface/pytorch-image-models/blob/main/results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
EXAMPLES = f"{GITHUB}/NVIDIA/DeepLearningExamples/blob/master"
TF_BERT, TF2_BERT = (f"{EXAMPLES}/TensorFlow{version}/LanguageModeling/BERT/README.md" for version in ("", "2"))
LADDER = "the program tries 512, 384, 256, 192 and so on, each smaller batch after the larger one failed"
ON_A100 = "no compiler that can be installed takes a V100: compiled for an A100, whose memory is left out of account"
EAGER = "PyTorch without a compiler"


class Fit(NamedTuple):
    """One step, and how it ended.

    Args:
        step: the key of the step, as in `published_runs.RUNS`.
        target: the target that it is compiled for.
        policy: the dtype policy.
        ran: whether it ran there; else it ran out of memory.
        source: the address of the report.
        note: the difference between the report and what was compiled.
        gibibytes: the memory of the chip at the source as its driver gives it, where it is another than the target's.
        chip: the name of that chip.
        strategy: the way in which several chips share the step.
        backend: the backend of Keras.
    """

    step: str
    target: str
    policy: str
    ran: bool
    source: str
    note: str = ""
    gibibytes: float = 0.0
    chip: str = ""
    strategy: str = "fully_sharded"
    backend: str = "jax"

    # What compile_run asks of a published run.
    keeps, flash = (), True


def _timm() -> dict[str, Fit]:
    """Pairs of a batch that ran on an RTX 3090 and the next larger one, which did not; 512 is the largest tried."""
    pairs = {
        "resnet50_": (512, None),
        "resnet101_": (256, 384),
        "resnet152_": (192, 256),
        "resnext101@": (256, 384),
        "se_resnext101@": (192, 256),
        "vit_b16@": (192, 256),
        "efficientnet_b0@": (512, None),
    }
    fits = {}
    for step, batches in pairs.items():
        for batch, ran in zip(batches, (True, False), strict=True):
            if batch:
                fits[f"timm, {step[:-1]}, {batch}, RTX 3090"] = Fit(
                    *(f"{step}{batch}", "rtx3090", "mixed_float16", ran, TIMM, f"{EAGER}; {LADDER}")
                )
    return fits


def _bert() -> dict[str, Fit]:
    """BERT-large in float32, compiled by XLA at the source, on V100 with the memory that the driver gives."""
    rows = (
        (TF_BERT, 15.78, "128", (8, 16)),
        (TF_BERT, 15.78, "512", (2, 4)),
        (TF_BERT, 15.78, "squad", (2, 4)),
        (TF_BERT, 31.75, "128", (32, 64)),
        (TF_BERT, 31.75, "squad", (10, 24)),
        (TF2_BERT, 31.75, "128", (None, 60)),
        (TF2_BERT, 31.75, "512", (None, 10)),
    )
    fits = {}
    for source, memory, kind, batches in rows:
        for batch, ran in zip(batches, (True, False), strict=True):
            if batch:
                fits[f"BERT-large, {kind}, {batch}, V100 {memory:.0f} GB"] = Fit(
                    *(f"bert_large_{kind}_{batch}", "a100", "float32", ran, source, ON_A100, memory, "V100")
                )
    return fits


FITS: dict[str, Fit] = {
    "LitGPT, Llama 2 7B, LoRA, 4 x 1304, A100 40 GB": Fit(
        "llama2_7b_lora8@4x1304", "a100-40gb", "bfloat16", False, LIT, EAGER
    ),
    "LitGPT, Llama 2 13B, LoRA, 2 x 1304, A100 40 GB": Fit(
        "llama2_13b_lora8@2x1304", "a100-40gb", "bfloat16", False, LIT, EAGER
    ),
    "LitGPT, Llama 2 13B, LoRA, 4 x 1304, A100 40 GB": Fit(
        "llama2_13b_lora8@4x1304", "a100-40gb", "bfloat16", False, LIT, EAGER
    ),
    "LitGPT, Gemma 7B, LoRA, 1 x 512, A10G": Fit("gemma_7b_lora8@1x512", "a10", "bfloat16", False, LIT_HUB, EAGER),
    "LitGPT, Llama 3.1 8B in full, 4 x 512, A10G": Fit(
        "llama3_8b@4x512-kept", "a10", "bfloat16", False, LIT_HUB, EAGER
    ),
    "LitGPT, Llama 2 7B in full, 4 x 512, 4 A10G": Fit("llama2_7b@4x512", "a10x4", "bfloat16", False, LIT_HUB, EAGER),
    "LitGPT, Llama 3 8B in full, 4 x 512, 4 A10G": Fit("llama3_8b@4x512", "a10x4", "bfloat16", False, LIT_HUB, EAGER),
    "Alpaca, LLaMA 7B in full, 4 x 512, A100 80 GB": Fit(
        "llama2_7b@4x512", "a100", "mixed_bfloat16", False, f"{GITHUB}/tatsu-lab/stanford_alpaca/issues/56", EAGER
    ),
    "GPT-2 124M, 8 x 1024, T4": Fit("gpt2@8x1024", "t4", "float32", False, f"{TRANSFORMERS}/8721", EAGER),
    "GPT-2 124M, 8 x 1024, P100": Fit(
        *("gpt2@8x1024", "t4", "float32", False, f"{TRANSFORMERS}/7177"),
        *(f"{EAGER}; compiled for a T4, as no compiler takes a P100", 15.90, "P100"),
    ),
    "GPT-2 124M, 1 x 1024, P100": Fit(
        *("gpt2@1x1024", "t4", "float32", True, f"{TRANSFORMERS}/7177"),
        *(f"{EAGER}; compiled for a T4, as no compiler takes a P100", 15.90, "P100"),
    ),
    "GPT-2 124M, 8 x 1024, V100 32 GB": Fit(
        *("gpt2@8x1024", "a100", "float32", False, f"{TRANSFORMERS}/10754", f"{EAGER}; {ON_A100}", 31.75, "V100")
    ),
    "modded-nanogpt, GPT-2 124M, 64 x 1024, L40S": Fit(
        *("gpt2@64x1024", "l40s", "mixed_bfloat16", False, f"{GITHUB}/KellerJordan/modded-nanogpt/issues/12"),
        "another compiler; GPT-2 there has rotary positions and a squared ReLU, and flash attention",
    ),
    "modded-nanogpt, GPT-2 124M, 32 x 1024, L40S": Fit(
        *("gpt2@32x1024", "l40s", "mixed_bfloat16", True, f"{GITHUB}/KellerJordan/modded-nanogpt/issues/12"),
        "another compiler; GPT-2 there has rotary positions and a squared ReLU, and flash attention",
    ),
    "GPT-2 124M, 256 x 512, TPU v3": Fit(
        *("gpt2@256x512", "v5e", "float32", False, f"{TRANSFORMERS}/21363"),
        "XLA; no compiler that can be installed takes a TPU v3: compiled for a v5e, of as much memory",
        *(15.48, "TPU v3"),
    ),
    **_timm(),
    **_bert(),
}
