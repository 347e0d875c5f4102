"""Published training steps, as their sources give them, and how far predictions of them are off.

A run is taken if all of this holds. None is dropped after it was compiled.

1. It is a training step whose model, batch, lengths, precision, optimizer and division over devices are in the source,
   or in the program that the source names.
2. `inspect` compiles for its chip, and the chip is in the form of its row in `keras_mp.chips`, or the row says how not.
3. Nothing is kept in the host's memory, and the devices are one host or one slice.
4. Its data do not limit it: synthetic, or loaded beside the step.
5. Kernels that were written by hand, which XLA does not have here (flash attention), do not exclude a run, nor does
   selective recomputation that Keras cannot say; the row is marked.
6. Where the slice is too large to be compiled here, the same work a chip is compiled for a smaller one, and the row
   says for which.
7. Convolutions of 16 bits have channels last in the source, as XLA compiles them. Added with the runs of Lambda's
   repository, before the first of them was compiled: there the ResNet-50 in 16 bits has channels first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

DEEP_LEARNING_EXAMPLES = "NVIDIA/DeepLearningExamples"
TORCHAO = "pytorch/ao docs/source/workflows/training.md, end-to-end training benchmarks"
KERAS_IO = "keras-team/keras-io templates/getting_started/benchmarks.md; haifeng-jin/keras-benchmarks v0.0.5"


class Run(NamedTuple):
    """One published training step.

    Args:
        step: the key in `STEPS`.
        target: the target that it is compiled for, with the number of chips.
        policy: the dtype policy.
        seconds: the seconds of a step, as published.
        figure: the figure of the source.
        source: the place of the figure.
        chips: the number of chips of the source, if it is not that of `target`.
        gigabytes: peak memory of a device, as published, in 10^9 bytes.
        note: the difference between the run and what was compiled.
        backend: the backend of Keras.
        rows: the rows of the batch, of a run whose speed-up is over one with another batch.
    """

    step: str
    target: str
    policy: str
    seconds: float
    figure: str
    source: str
    chips: int = 1
    gigabytes: float | None = None
    note: str = ""
    backend: str = "jax"
    rows: int = 1


OWN_ATTENTION = "flash attention in the source"
SELECTIVE = f"{OWN_ATTENTION}, and it recomputes selectively; compiled with each block recomputed"
BINNED = "the source bins sequences of up to 512 tokens by length, so that its batches hold fewer"
LAMBDA = "lambdal/deeplearning-benchmark pytorch"
OTHER_LAYOUT = "channels first in the source, compiled with channels last"
OWN_NORMALIZATION = "batch normalization of the source is fused by hand with the addition and the ReLU"
RUNS = {
    "GPT-2 124M": Run(
        *("gpt2", "a100-40gb", "mixed_bfloat16", 0.135, "135 ms", "karpathy/nanoGPT README.md, efficiency notes"),
    ),
    "ResNet-50 v1.5, TF32": Run(
        *("resnet50_256", "a100-40gb", "float32", 256 / 909, "909 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow/Classification/ConvNets/resnet50v1.5/README.md",
    ),
    "ResNet-50 v1.5, AMP": Run(
        *("resnet50_256", "a100-40gb", "mixed_float16", 256 / 2375, "2,375 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow/Classification/ConvNets/resnet50v1.5/README.md",
    ),
    "ResNet-50 v1.5, PyTorch, TF32": Run(
        *("resnet50_256", "a100", "float32", 256 / 938, "938 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
    ),
    "ResNet-50 v1.5, PyTorch, AMP": Run(
        *("resnet50_256", "a100", "mixed_float16", 256 / 2470, "2,470 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
    ),
    "ResNet-50 v1.5, Paddle, TF32": Run(
        *("resnet50_256", "a100", "float32", 256 / 1024, "1,024 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} PaddlePaddle/Classification/RN50v1.5/README.md",
    ),
    "ResNet-50 v1.5, Paddle, AMP": Run(
        *("resnet50_256", "a100", "mixed_float16", 256 / 2897, "2,897 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} PaddlePaddle/Classification/RN50v1.5/README.md",
        note=OWN_NORMALIZATION,
    ),
    "ResNet-50 v1.5, MXNet, TF32": Run(
        *("resnet50_512", "a100", "float32", 512 / 1055.78, "1,055.78 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} MxNet/Classification/RN50v1.5/README.md",
    ),
    "ResNet-50 v1.5, MXNet, AMP": Run(
        *("resnet50_512", "a100", "mixed_float16", 512 / 3410.52, "3,410.52 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} MxNet/Classification/RN50v1.5/README.md",
        note=OWN_NORMALIZATION,
    ),
    "BERT base, Keras 3 on JAX": Run(*("bert_base", "a100-40gb", "float32", 0.22237, "222.37 ms", KERAS_IO)),
    "BERT base, Keras 3 on TensorFlow": Run(
        *("bert_base", "a100-40gb", "float32", 0.21449, "214.49 ms", KERAS_IO), backend="tensorflow"
    ),
    "Mistral 7B, LoRA, Keras 3 on JAX": Run(*("mistral", "a100-40gb", "bfloat16", 0.21322, "213.22 ms", KERAS_IO)),
    "Gemma 7B, LoRA, Keras 3 on JAX": Run(*("gemma", "a100-40gb", "bfloat16", 0.27367, "273.67 ms", KERAS_IO)),
    "BERT-large, SQuAD, TF32": Run(
        *("bert_large_squad_32", "a100", "float32", 32 / 61.5, "61.5 sequences/s"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, fine-tuning",
    ),
    "BERT-large, SQuAD, FP16": Run(
        *("bert_large_squad_32", "a100", "mixed_float16", 32 / 110.5, "110.5 sequences/s"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, fine-tuning",
    ),
    "BERT-large, pretraining 128, TF32": Run(
        *("bert_large_128_128", "a100", "float32", 128 / 317, "317 sequences/s in micro-batches"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, pre-training",
    ),
    "BERT-large, pretraining 128, FP16": Run(
        *("bert_large_128_256", "a100", "mixed_float16", 256 / 580, "580 sequences/s in micro-batches"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, pre-training",
    ),
    "BERT-large, pretraining 512, TF32": Run(
        *("bert_large_512_16", "a100", "float32", 16 / 110, "110 sequences/s in micro-batches"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, pre-training",
        note=BINNED,
    ),
    "BERT-large, pretraining 512, FP16": Run(
        *("bert_large_512_32", "a100", "mixed_float16", 32 / 210, "210 sequences/s in micro-batches"),
        f"{DEEP_LEARNING_EXAMPLES} PyTorch/LanguageModeling/BERT/README.md, pre-training",
        note=BINNED,
    ),
    "Llama 3 8B, bfloat16, 8 H100": Run(
        *("llama3", "h100x8", "mixed_bfloat16", 8192 / 6150, "6,150 tokens/s a GPU", TORCHAO, 8, 47.65, SELECTIVE),
    ),
    "Llama 3 8B, FP8, 8 H100": Run(
        *("llama3_fp8", "h100x8", "mixed_bfloat16", 8192 / 7689.5, "7,689.5 tokens/s a GPU"),
        *(TORCHAO, 8, 47.77, f"{SELECTIVE}; weights are gathered in FP8 there"),
    ),
    "Llama 3 8B, bfloat16, 8 B200": Run(
        *("llama3", "b200x8", "mixed_bfloat16", 8192 / 8307.5, "8,307.5 tokens/s a GPU"),
        *(TORCHAO, 8, 33.71, f"{SELECTIVE}; the GPUs' power is limited"),
    ),
    "Llama 3 8B, FP8, 8 B200": Run(
        *("llama3_fp8", "b200x8", "mixed_bfloat16", 8192 / 10417, "10,417 tokens/s a GPU"),
        *(TORCHAO, 8, 33.38, f"{SELECTIVE}; weights are gathered in FP8 there; the GPUs' power is limited"),
    ),
    "MaxText 32B, v5e-256": Run(
        *("maxtext_32b", "v5e-16", "mixed_bfloat16", 1596e12 / 132e12, "132 TFLOP/s a chip of 1,596 TFLOP a step"),
        "AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v5e/README.md, 32b.sh",
        *(256, None, OWN_ATTENTION),
    ),
    "GPT-3 175B, v6e-256": Run(
        *("gpt3_175b", "v6e-16", "mixed_bfloat16", 17.182, "17.182 s"),
        "AI-Hypercomputer/tpu-recipes training/trillium/GPT3-175B-MaxText/bf16/README.md",
        *(256, None, OWN_ATTENTION),
    ),
    "Llama 3.1 70B, v7x-64": Run(
        *("llama70", "v7x-2x2x1", "mixed_bfloat16", 12.20, "12.20 s"),
        "AI-Hypercomputer/tpu-recipes training/ironwood/README.md, llama3.1-70b/8k-bf16-tpu7x-4x4x4",
        *(64, None, f"{OWN_ATTENTION}; the projections' results are kept, not recomputed"),
    ),
}
# One GPU each, with NVIDIA's programs for PyTorch: the target, the system in the source, and the rows and the rows a
# second of ResNet-50 in TF32, of BERT-large on SQuAD in TF32, and of BERT-large on SQuAD in FP16.
LAMBDAS = (
    ("rtx3090", "3090_v1", (224, 513.04), (16, 24.82), (28, 52.57)),
    ("a10", "LambdaCloud_A10_v1", (224, 349.39), (12, 19.35), (28, 42.45)),
    ("a100-40gb-pcie", "LambdaCloud_A100_40GB_PCIe_v1", (360, 882.00), (28, 53.94), (48, 117.87)),
    ("a100", "A100_80GB_SXM4_v1", (640, 1066.76), (64, 75.59), (112, 152.85)),
    ("rtxa6000", "A6000_v1", (496, 514.85), (32, 33.37), (64, 68.13)),
    ("rtx6000ada", "AdaA6000_v1", (496, 647.21), (32, 44.54), (64, 79.03)),
    ("rtx4090", "4090_v1", (224, 721.00), (16, 44.99), (28, 93.59)),
    ("h100-pcie", "H100_80GB_PCIe5_v1", (640, 1196.85), (64, 97.20), (112, 203.26)),
    ("h100", "H100_80GB_SXM5_v1", (640, 1753.15), (64, 141.84), (112, 301.10)),
    ("gh200", "LambdaOD_1x_1xGH200_96GB_192-222-57-0_v2", (720, 2062.51), (80, 131.71), (152, 296.22)),
    ("h200", "LambdaBM_ENG04_1xH200_140GB_SXM_h200_v2", (1280, 2259.15), (96, 181.25), (192, 349.54)),
    ("b200", "LambdaOD_test_1xB200_192GB_129-213-83-251_v2", (1664, 2966.70), (128, 281.94), (256, 523.11)),
)
# XLA compiles the TF32 convolutions of these with channels last, which was seen when they were compiled.
LAYS_OUT = ("h100", "h100-pcie", "gh200", "h200", "b200")


def _of_lambda() -> Iterator[tuple[str, Run]]:
    for target, system, *measured in LAMBDAS:
        folder = f"{LAMBDA}/results{'_v2' if system.endswith('_v2') else ''}/{system}"
        steps = (
            ("ResNet-50 v1.5, TF32", "resnet50", "float32", "images"),
            ("BERT-large, SQuAD, TF32", "bert_large_squad", "float32", "sequences"),
            ("BERT-large, SQuAD, FP16", "bert_large_squad", "mixed_float16", "sequences"),
        )
        for (name, step, policy, unit), (rows, rate) in zip(steps, measured, strict=True):
            figure = f"{rate:,} {unit}/s, batch {rows}"
            note = OTHER_LAYOUT if step == "resnet50" and target in LAYS_OUT else ""
            run = Run(f"{step}_{rows}", target, policy, rows / rate, figure, folder, note=note, rows=rows)
            yield f"{name}, {target}", run


RUNS |= dict(_of_lambda())


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of each run that was compiled, the predicted time divided by the published."""
    return {name: results[name]["seconds"] / run.seconds for name, run in RUNS.items() if name in results}


def compiles(run: Run) -> bool:
    """Whether the source compiles its step, as the kit does, and does not start one kernel after another."""
    return any(part in run.source for part in ("keras-io", "maxtext", "tpu-recipes", "nanoGPT", "pytorch/ao"))


def error(ratio: float) -> float:
    """How far a ratio is from 1, whichever of the two is larger: 0.5 and 2 are equally wrong."""
    return max(ratio, 1 / ratio) - 1
