"""Published training steps, as their sources give them, and how far predictions of them are off.

A run is taken if all of this holds. None is dropped after it was compiled.

1. It is a training step whose model, batch, lengths, precision, optimizer and division over devices are in the source,
   or in the program that the source names, at the commit to which the figure belongs.
2. `inspect` compiles for its chip, and the chip is in the form of its row in `keras_mp.chips`, or the row says how not.
3. Nothing is kept in the host's memory but what the kit can keep there, the optimizer's states; activations are not.
   The devices are one host or one slice.
4. Its data do not limit it: synthetic, or loaded beside the step.
5. Kernels that were written by hand (flash attention) do not exclude a run, nor does selective recomputation that Keras
   cannot say; the row is marked, or compiled with a policy of JAX (torchtitan's). Runs of 32,768 tokens and more were
   not taken before 29 November, as attention needs such kernels there, which `inspect` did not have then.
6. Where the slice is too large to be compiled here, the same work a chip is compiled for a smaller one, and the row
   says for which. Of the runs of `ADDED` it is one of 8 chips (of v7x of 4 chips, which are 8 devices).
7. Convolutions of 16 bits have channels last in the source, as XLA compiles them. Added with the runs of Lambda's
   repository, before the first of them was compiled: there the ResNet-50 in 16 bits has channels first.

These were added with the runs of `ADDED`, before the first of them was compiled:

8. A run belongs to one of three groups, by what made its kernels at the source: XLA, another compiler, or none. XLA's
   is what `inspect` compiles with; its score is the one that reports quote.
9. A compile takes no more than `LIMIT` seconds on one core. Where it does, or fails for want of memory, the forms of
   `SMALLER` are tried in turn: fewer blocks, and with the last the smallest slice. A run of which none is compiled is a
   failure: it is counted and listed with the reason.
   Attention of the language models of `ADDED`, and of the TPUs' runs before, is compiled in `ATTENTION_BLOCKS` blocks
   of rows: the 16 that the kit takes make a program that a TPU's compiler needs minutes for. Added when the first of
   them had taken two minutes, and had no result.
10. Products that the source divides over a few chips (tensor parallelism) beside full sharding are compiled fully
   sharded, with the same rows a chip; the row is marked.
11. A quarter of `ADDED`, the first by the hashes of their names, is set aside: its score is given apart.
12. Seconds are taken from the source where it has them, and else its rate divides the operations that its program of
   that day counts in a step.
13. Where the source states flash attention, the step is compiled with the kernel that its chip has, Splash or cuDNN's.
   Before `inspect` could, the time was that of the compiled kernels of which the arrays of scores stay in the cores and
   move no bytes; that stands beside it, and is the score of a row that was not compiled again, which says so.
14. A loss that the source does not compile, in a program of PyTorch, has there each of its arrays in memory, and is
   compiled so (`benchmarks/eager_loss.py`): torchtitan's until April 2025, and torchtune's, which compiles it and drops
   the result.
15. A TPU's step may be taken at the stage where its compiler has assigned memory: its kernels, their order and so its
   time are those of the finished step (honeycrisp-3B on v5p-1024, compiled both ways, has the same), but it has no
   cycles, and no code in its memory. Added when Llama 2 70B on v6e-256 had taken 582 s, before the first row was taken
   so. A row that was compiled before is timed again at that stage where the model of time changes; it keeps its cycles
   and its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

DEEP_LEARNING_EXAMPLES = "NVIDIA/DeepLearningExamples"
TORCHAO = "pytorch/ao docs/source/workflows/training.md, end-to-end training benchmarks"
KERAS_IO = "keras-team/keras-io templates/getting_started/benchmarks.md; haifeng-jin/keras-benchmarks v0.0.5"


# The groups: what made the kernels at the source.
XLA, OTHER, NONE = "XLA", "another compiler", "no compiler"
# Rule 9: the seconds of a compile, and the numbers of blocks that are taken instead where they are exceeded.
LIMIT = 600
SMALLER = ((2, 4), (1, 2))
ATTENTION_BLOCKS = 4


class Run(NamedTuple):
    """One published training step.

    Args:
        step: the key in `STEPS`.
        target: the target that it is compiled for, with the number of chips.
        policy: the dtype policy.
        seconds: the seconds of a step, as published; None where the source gives memory alone.
        figure: the figure of the source.
        source: the place of the figure.
        chips: the number of chips of the source, if it is not that of `target`.
        gigabytes: peak memory of a device, as published, in 10^9 bytes.
        note: the difference between the run and what was compiled.
        backend: the backend of Keras.
        rows: the rows of the batch, of a run whose speed-up is over one with another batch.
        group: the compiler that made the kernels at the source: XLA, another, or none.
        strategy: the way in which several chips share the step.
    """

    step: str
    target: str
    policy: str
    seconds: float | None
    figure: str
    source: str
    chips: int = 1
    gigabytes: float | None = None
    note: str = ""
    backend: str = "jax"
    rows: int = 1
    group: str = NONE
    strategy: str = "fully_sharded"

    @property
    def flash(self) -> bool:
        """Whether the source states that it runs flash attention."""
        return OWN_ATTENTION in self.note

    @property
    def keeps(self) -> tuple[int, ...]:
        """The products of a Llama's block that the source keeps beside attention's result, as compiled; from 0."""
        kept = {SELECTIVE: (0, 2, 4), OWN_PROJECTIONS: (0,), OWN_PRODUCTS: (0, 1, 2, 3, 4)}
        return next((numbers for note, numbers in kept.items() if note in self.note), ())


GIB = 1.073741824  # in 10^9 bytes
OWN_ATTENTION = "flash attention in the source"
EAGER = "the loss is not compiled there, and its arrays are in memory, as compiled"
SELECTIVE = f"{OWN_ATTENTION}, which keeps its result and that of every second product, as compiled"
BINNED = "the source bins sequences of up to 512 tokens by length, so that its batches hold fewer"
LAMBDA = "lambdal/deeplearning-benchmark pytorch"
OTHER_LAYOUT = "channels first in the source, compiled with channels last"
OWN_NORMALIZATION = "batch normalization of the source is fused by hand with the addition and the ReLU"
ONE_KERNEL, TWO_KERNELS = (f"its gradients are of {number}, as compiled" for number in ("one kernel", "two kernels"))
OWN_PROJECTIONS = f"{OWN_ATTENTION}, which keeps its result, queries, keys and values; {ONE_KERNEL}"
OWN_PRODUCTS = f"{OWN_ATTENTION}, which keeps its result and those of all products"
KEPT_PRODUCTS = f"{OWN_ATTENTION}; only what is no product is recomputed there, compiled without recomputation"
DIVIDED = f"{KEPT_PRODUCTS}; products divided over %d chips there, compiled fully sharded"
NOT_STATED = "the source does not say whether attention is flash attention; it recomputes selectively"
OWN_NORMALIZED = f"{NOT_STATED}, and normalizes queries and keys; compiled with each block recomputed, without"
MAXTEXT_V5E = "AI-Hypercomputer/maxtext at 5ebcd67fe (October 2023), README.md and MaxText/configs/largest_job"
MAXTEXT_V5P = "AI-Hypercomputer/maxtext at 76bd53b0f (December 2023), MaxText/configs/v5p"
MAXTEXT_V4 = "AI-Hypercomputer/maxtext at 281e04bf3 (April 2023), README.md and MaxText/configs"
IRONWOOD = "AI-Hypercomputer/tpu-recipes training/ironwood/README.md"
FUJI = "apple/axlearn axlearn/experiments/text/gpt/fuji.py, step times in comments"
GALA = "apple/axlearn axlearn/experiments/text/gpt/gala.py, step times in comments"
HONEYCRISP = "apple/axlearn axlearn/experiments/text/gpt/honeycrisp.py, step times in comments"
TOOLBOX = "NVIDIA/JAX-Toolbox"
TF_BERT = f"{DEEP_LEARNING_EXAMPLES} TensorFlow/LanguageModeling/BERT/README.md"
TF2_BERT = f"{DEEP_LEARNING_EXAMPLES} TensorFlow2/LanguageModeling/BERT/README.md"
TF_CLASSIFIERS = f"{DEEP_LEARNING_EXAMPLES} TensorFlow/Classification/ConvNets"


def _rate(
    rate: float, layers: int, width: int, heads: int, hidden: int, rows: int, length: int = 2048, counted: bool = True
) -> float:
    """The seconds of a step by the rate of MaxText of 2023, in TFLOP/s a chip.

    Args:
        rate: the operations of a second on a chip, in TFLOP.
        layers, width, heads, hidden: the sizes of its own decoder, whose heads have 256 features and whose vocabulary
            has 32,768 tokens.
        rows, length: the batch of a chip.
        counted: whether the program counts attention, which it did not before August 2023.
    """
    weights = layers * (4 * width * heads * 256 + 2 * width * hidden) + 32768 * width
    attention = 12 * layers * heads * 256 * length**2 * rows if counted else 0
    return (6 * weights * rows * length + attention) / (rate * 1e12)


RUNS = {
    "GPT-2 124M": Run(
        *("gpt2", "a100-40gb", "mixed_bfloat16", 0.135, "135 ms", "karpathy/nanoGPT README.md, efficiency notes"),
        group=OTHER,
    ),
    "ResNet-50 v1.5, TF32": Run(
        *("resnet50_256", "a100-40gb", "float32", 256 / 909, "909 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow/Classification/ConvNets/resnet50v1.5/README.md",
        group=XLA,
    ),
    "ResNet-50 v1.5, AMP": Run(
        *("resnet50_256", "a100-40gb", "mixed_float16", 256 / 2375, "2,375 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow/Classification/ConvNets/resnet50v1.5/README.md",
        group=XLA,
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
    "BERT base, Keras 3 on JAX": Run(*("bert_base", "a100-40gb", "float32", 0.22237, "222.37 ms", KERAS_IO), group=XLA),
    "BERT base, Keras 3 on TensorFlow": Run(
        *("bert_base", "a100-40gb", "float32", 0.21449, "214.49 ms", KERAS_IO), backend="tensorflow", group=XLA
    ),
    "Mistral 7B, LoRA, Keras 3 on JAX": Run(
        *("mistral", "a100-40gb", "bfloat16", 0.21322, "213.22 ms", KERAS_IO), group=XLA
    ),
    "Gemma 7B, LoRA, Keras 3 on JAX": Run(
        *("gemma", "a100-40gb", "bfloat16", 0.27367, "273.67 ms", KERAS_IO), group=XLA
    ),
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
        *("llama3_eager", "h100x8", "mixed_bfloat16", 8192 / 6150, "6,150 tokens/s a GPU"),
        *(TORCHAO, 8, 47.65 * GIB, f"{SELECTIVE}; {EAGER}"),
        group=OTHER,
    ),
    "Llama 3 8B, FP8, 8 H100": Run(
        *("llama3_eager_fp8", "h100x8", "mixed_bfloat16", 8192 / 7689.5, "7,689.5 tokens/s a GPU"),
        *(TORCHAO, 8, 47.77 * GIB, f"{SELECTIVE}; {EAGER}; weights are gathered in FP8 there"),
        group=OTHER,
    ),
    "Llama 3 8B, bfloat16, 8 B200": Run(
        *("llama3", "b200x8", "mixed_bfloat16", 8192 / 8307.5, "8,307.5 tokens/s a GPU"),
        *(TORCHAO, 8, 33.71 * GIB, f"{SELECTIVE}; the GPUs' power is limited"),
        group=OTHER,
    ),
    "Llama 3 8B, FP8, 8 B200": Run(
        *("llama3_fp8", "b200x8", "mixed_bfloat16", 8192 / 10417, "10,417 tokens/s a GPU"),
        *(TORCHAO, 8, 33.38 * GIB, f"{SELECTIVE}; weights are gathered in FP8 there; the GPUs' power is limited"),
        group=OTHER,
    ),
    "MaxText 32B, v5e-256": Run(
        *("maxtext_32b@4x2048", "v5e-16", "mixed_bfloat16", _rate(132, 32, 10240, 32, 32768, 4)),
        *("132 TFLOP/s a chip", MAXTEXT_V5E, 256, None, OWN_ATTENTION),
        group=XLA,
    ),
    "GPT-3 175B, v6e-256": Run(
        *("gpt3_175b@3x2048", "v6e-8", "mixed_bfloat16", 17.182, "17.182 s"),
        "AI-Hypercomputer/tpu-recipes training/trillium/GPT3-175B-MaxText/bf16/README.md",
        *(256, None, OWN_ATTENTION),
        group=XLA,
    ),
    "Llama 3.1 70B, v7x-64": Run(
        *("llama3_70b@2x8192", "v7x-2x2x1", "mixed_bfloat16", 12.20, "12.20 s"),
        f"{IRONWOOD}, llama3.1-70b/8k-bf16-tpu7x-4x4x4",
        *(64, None, OWN_PROJECTIONS),
        group=XLA,
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

ADDED = {
    # TPUs.
    "MaxText 22B, v4-128": Run(
        *("maxtext_22b@16x1024", "v4-16", "mixed_bfloat16", _rate(156, 48, 6144, 24, 24576, 16, 1024, False)),
        *("156 TFLOP/s a chip", MAXTEXT_V4, 64, None, "relative positions in the source, compiled without"),
    ),
    "MaxText 52B, v4-384": Run(
        *("maxtext_52b@10x1024", "v4-16", "mixed_bfloat16", _rate(154, 32, 12288, 32, 49152, 10, 1024, False)),
        *("154 TFLOP/s a chip", MAXTEXT_V4, 192, None, "relative positions in the source, compiled without"),
    ),
    "fuji-7B v1, v4-1024": Run(
        *("fuji_7b@4x2048", "v4-16", "mixed_bfloat16", 3.03, "3.03 s, 4M tokens", FUJI, 512, None, NOT_STATED),
    ),
    "MaxText 16B, v5e-256": Run(
        *("maxtext_16b@6x2048", "v5e-8", "mixed_bfloat16", _rate(120, 32, 5120, 32, 32768, 6)),
        *("120 TFLOP/s a chip", MAXTEXT_V5E, 256, None, OWN_ATTENTION),
    ),
    "MaxText 64B, v5e-256": Run(
        *("maxtext_64b@2x2048", "v5e-8", "mixed_bfloat16", _rate(118, 64, 10240, 32, 32768, 2)),
        *("118 TFLOP/s a chip", MAXTEXT_V5E, 256, None, OWN_ATTENTION),
    ),
    "fuji-7B v1, v5e-32": Run(
        *("fuji_7b@2x2048", "v5e-8", "mixed_bfloat16", 1.93, "1.93 s, 128K tokens", FUJI, 32, None, NOT_STATED),
    ),
    "gala-85M, v5e-256": Run(
        *("gala_85m@1x4096", "v5e-8", "mixed_bfloat16", 0.18, "0.18 s, 1M tokens", GALA, 256, None, OWN_NORMALIZED),
    ),
    "gala-1B, v5e-256": Run(
        *("gala_1b@1x4096", "v5e-8", "mixed_bfloat16", 0.87, "0.87 s, 1M tokens", GALA, 256, None, OWN_NORMALIZED),
    ),
    "honeycrisp-85M, v5e-32": Run(
        *("honeycrisp_85m@8x4096", "v5e-8", "mixed_bfloat16", 0.67, "0.67 s, 1M tokens", HONEYCRISP, 32, None),
        OWN_NORMALIZED,
        strategy="data",
    ),
    "MaxText 32B, v5p-128": Run(
        *("maxtext_32b@6x2048-kept", "v5p-16", "mixed_bfloat16", _rate(328, 32, 10240, 32, 32768, 6)),
        *("328 TFLOP/s a chip", MAXTEXT_V5P, 64, None, DIVIDED % 4),
    ),
    "MaxText 64B, v5p-128": Run(
        *("maxtext_64b@3x2048-kept", "v5p-16", "mixed_bfloat16", _rate(323, 64, 10240, 32, 32768, 3)),
        *("323 TFLOP/s a chip", MAXTEXT_V5P, 64, None, DIVIDED % 4),
    ),
    "MaxText 128B, v5p-256": Run(
        *("maxtext_128b@1x2048-kept", "v5p-16", "mixed_bfloat16", _rate(315, 64, 10240, 64, 65536, 1)),
        *("315 TFLOP/s a chip", MAXTEXT_V5P, 128, None, DIVIDED % 8),
    ),
    "MaxText 128B, v5p-512": Run(
        *("maxtext_128b@1x2048-kept", "v5p-16", "mixed_bfloat16", _rate(316, 64, 10240, 64, 65536, 1)),
        *("316 TFLOP/s a chip", MAXTEXT_V5P, 256, None, DIVIDED % 8),
    ),
    "fuji-7B v1, v5p-512": Run(
        *("fuji_7b@8x2048", "v5p-16", "mixed_bfloat16", 2.85, "2.85 s, 4M tokens", FUJI, 256, None, NOT_STATED),
    ),
    "honeycrisp-3B, v5p-1024": Run(
        *("honeycrisp_3b@4x4096", "v5p-16", "mixed_bfloat16", 1.48, "1.48 s, 8M tokens", HONEYCRISP, 512, None),
        OWN_NORMALIZED,
        strategy="data",
    ),
    "honeycrisp-3B, v5p-2048": Run(
        *("honeycrisp_3b@2x4096", "v5p-16", "mixed_bfloat16", 0.8, "0.8 s, 8M tokens", HONEYCRISP, 1024, None),
        OWN_NORMALIZED,
        strategy="data",
    ),
    "honeycrisp-3B, v5p-4096": Run(
        *("honeycrisp_3b@1x4096", "v5p-16", "mixed_bfloat16", 0.47, "0.47 s, 8M tokens", HONEYCRISP, 2048, None),
        OWN_NORMALIZED,
        strategy="data",
    ),
    "Llama 2 70B, v6e-256": Run(
        *("llama2_70b@4x4096", "v6e-8", "mixed_bfloat16", 17.373, "17.373 s"),
        "AI-Hypercomputer/tpu-recipes at 5f53866 (October 2024), training/trillium/Llama2-70B-MaxText/README.md",
        *(256, None, OWN_ATTENTION),
    ),
    "Llama 3.1 70B, v7x-256": Run(
        *("llama3_70b@2x8192", "v7x-2x2x1", "mixed_bfloat16", 12.27, "12.27 s"),
        *(f"{IRONWOOD}, llama3.1-70b/8k-bf16-tpu7x-4x8x8", 256, None, OWN_PROJECTIONS),
    ),
    "Llama 3.1 70B, FP8, v7x-64": Run(
        *("llama3_70b@2x8192-fp8", "v7x-2x2x1", "mixed_bfloat16", 7.93, "7.93 s"),
        *(f"{IRONWOOD}, llama3.1-70b/8k-fp8-tpu7x-4x4x4", 64, None, OWN_PROJECTIONS),
    ),
    "Llama 3.1 70B, FP8, v7x-256": Run(
        *("llama3_70b@2x8192-fp8", "v7x-2x2x1", "mixed_bfloat16", 7.95, "7.95 s"),
        *(f"{IRONWOOD}, llama3.1-70b/8k-fp8-tpu7x-4x8x8", 256, None, OWN_PROJECTIONS),
    ),
    # GPUs.
    "Llama 2 7B, MaxText, 8 H100": Run(
        *("llama2_7b@2x4096-kept", "h100x8", "mixed_bfloat16", 0.721, "0.721 s"),
        *(f"{TOOLBOX} docs/frameworks/maxtext/README.md", 8, None, KEPT_PRODUCTS),
    ),
    "Llama 2 7B, MaxText, 8 H100, 32 rows": Run(
        *("llama2_7b@4x4096-kept", "h100x8", "mixed_bfloat16", 715.2 / 492, "492 TFLOP/s a chip of 715 TFLOP a step"),
        "AI-Hypercomputer/maxtext at efb6d9e4a (April 2024), MaxText/configs/a3/llama_2_7b",
        *(8, None, KEPT_PRODUCTS),
    ),
    "fuji-7B v1, 128K tokens, 8 H100": Run(
        *("fuji_7b@8x2048", "h100x8", "mixed_bfloat16", 2.03, "2.03 s", FUJI, 8, None, NOT_STATED),
    ),
    "fuji-7B v1, 64K tokens, 8 H100": Run(
        *("fuji_7b@4x2048", "h100x8", "mixed_bfloat16", 1.1, "1.1 s", FUJI, 8, None, NOT_STATED),
    ),
    "fuji-7B v2, 64K tokens, 8 H100": Run(
        *("fuji_7b@2x4096", "h100x8", "mixed_bfloat16", 1.54, "1.54 s", FUJI, 8, None, NOT_STATED),
    ),
    "ViT-B/16, 8 A100": Run(
        *("vit_b16@512", "a100x8", "mixed_bfloat16", 4096 / 7200.38, "7,200.38 samples/s"),
        *(f"{TOOLBOX} before ddf1b991, rosetta/rosetta/projects/vit/README.md", 8),
        strategy="data",
    ),
    "ViT-B/16, 8 H100": Run(
        *("vit_b16@512", "h100x8", "mixed_bfloat16", 4096 / 11669.52, "11,669.52 samples/s"),
        *(f"{TOOLBOX} before ddf1b991, rosetta/rosetta/projects/vit/README.md", 8),
        strategy="data",
    ),
    "ResNeXt-101, TF32": Run(
        *("resnext101@128", "a100-40gb", "float32", 128 / 371, "371 img/s"),
        f"{TF_CLASSIFIERS}/resnext101-32x4d/README.md",
        rows=128,
    ),
    "ResNeXt-101, AMP": Run(
        *("resnext101@256", "a100-40gb", "mixed_float16", 256 / 1132, "1,132 img/s"),
        f"{TF_CLASSIFIERS}/resnext101-32x4d/README.md",
        rows=256,
    ),
    "SE-ResNeXt-101, TF32": Run(
        *("se_resnext101@128", "a100-40gb", "float32", 128 / 342, "342 img/s"),
        f"{TF_CLASSIFIERS}/se-resnext101-32x4d/README.md",
        rows=128,
    ),
    "SE-ResNeXt-101, AMP": Run(
        *("se_resnext101@256", "a100-40gb", "mixed_float16", 256 / 975, "975 img/s"),
        f"{TF_CLASSIFIERS}/se-resnext101-32x4d/README.md",
        rows=256,
    ),
    "BERT-large, SQuAD, TensorFlow, TF32": Run(
        *("bert_large_squad_16", "a100-40gb", "float32", 16 / 61.364, "61.364 sequences/s", f"{TF_BERT}, fine-tuning"),
        rows=16,
    ),
    "BERT-large, SQuAD, TensorFlow, FP16": Run(
        *("bert_large_squad_32", "a100-40gb", "mixed_float16", 32 / 102.26, "102.26 sequences/s"),
        f"{TF_BERT}, fine-tuning",
        rows=32,
    ),
    "BERT-large, SQuAD, TensorFlow 2, TF32": Run(
        *("bert_large_squad_38", "a100", "float32", 38 / 43.9, "43.9 sequences/s", f"{TF2_BERT}, fine-tuning"),
        rows=38,
    ),
    "BERT-large, SQuAD, TensorFlow 2, FP16": Run(
        *("bert_large_squad_76", "a100", "mixed_float16", 76 / 134.22, "134.22 sequences/s"),
        f"{TF2_BERT}, fine-tuning",
        rows=76,
    ),
    "BERT-large, pretraining 128, TensorFlow 2, TF32": Run(
        *("bert_large_128_176", "a100", "float32", 176 / 282.98, "282.98 sequences/s in micro-batches"),
        f"{TF2_BERT}, pre-training",
    ),
    "BERT-large, pretraining 128, TensorFlow 2, FP16": Run(
        *("bert_large_128_312", "a100", "mixed_float16", 312 / 485.59, "485.59 sequences/s in micro-batches"),
        f"{TF2_BERT}, pre-training",
    ),
    "BERT-large, pretraining 512, TensorFlow 2, TF32": Run(
        *("bert_large_512_22", "a100", "float32", 22 / 54.92, "54.92 sequences/s in micro-batches"),
        f"{TF2_BERT}, pre-training",
    ),
    "BERT-large, pretraining 512, TensorFlow 2, FP16": Run(
        *("bert_large_512_40", "a100", "mixed_float16", 40 / 96.52, "96.52 sequences/s in micro-batches"),
        f"{TF2_BERT}, pre-training",
    ),
    "Mistral 7B, LoRA, Keras 3 on TensorFlow": Run(
        *("mistral", "a100-40gb", "bfloat16", 0.18592, "185.92 ms", KERAS_IO), backend="tensorflow"
    ),
    "Gemma 7B, LoRA, Keras 3 on TensorFlow": Run(
        *("gemma", "a100-40gb", "bfloat16", 0.23252, "232.52 ms", KERAS_IO), backend="tensorflow"
    ),
    "EfficientNet-B0, TF32": Run(
        *("efficientnet_b0@512", "a100", "float32", 512 / 1209, "1,209 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow2/Classification/ConvNets/efficientnet_v1/README.md",
        rows=512,
    ),
    "EfficientNet-B0, AMP": Run(
        *("efficientnet_b0@1024", "a100", "mixed_float16", 1024 / 3454, "3,454 img/s"),
        f"{DEEP_LEARNING_EXAMPLES} TensorFlow2/Classification/ConvNets/efficientnet_v1/README.md",
        rows=1024,
    ),
}
ADDED = {name: run._replace(group=XLA) for name, run in ADDED.items()}
RUNS |= ADDED

TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, table 1"
TITAN_NOTE = f"{SELECTIVE}; {EAGER}; the GPUs have 96 GB of HBM2e and draw 500 W"
TUNE = "pytorch/torchtune README.md, optimization flags"
LIT = "Lightning-AI/litgpt tutorials/resource-tables.md, LoRA on 1 GPU"
LIT_HUB = "Lightning-AI/litgpt config_hub/finetune/README.md"
HUB = f"{OWN_ATTENTION}, and a loss in chunks; compiled is KerasHub's model, lean"
A10G = f"{HUB}; on an A10G there"
ON_ALL = f"{A10G}, with LoRA on every product, and dropout; compiled with LoRA on queries and values"
# Runs with a peak of memory, added before the first of them was compiled. None was compiled by XLA.
MEMORY = {
    "Llama 3.1 8B, FSDP, 8 H100": Run(
        *("llama3_2x8192_eager", "h100x8", "mixed_bfloat16", 16384 / 5762, "5,762 tokens/s a GPU, 82.4 GiB"),
        *(TITAN, 8, 82.4 * GIB, TITAN_NOTE),
    ),
    "Llama 3.1 8B, FSDP, compiled, 8 H100": Run(
        *("llama3_2x8192_eager", "h100x8", "mixed_bfloat16", 16384 / 6667, "6,667 tokens/s a GPU, 77.0 GiB"),
        *(TITAN, 8, 77.0 * GIB, TITAN_NOTE),
        group=OTHER,
    ),
    "Llama 3.1 8B, FSDP, compiled, FP8, 8 H100": Run(
        *("llama3_2x8192_eager_fp8", "h100x8", "mixed_bfloat16", 16384 / 8532, "8,532 tokens/s a GPU, 76.8 GiB"),
        *(TITAN, 8, 76.8 * GIB, TITAN_NOTE),
        group=OTHER,
    ),
    "Llama 3.2 3B, packed": Run(
        *("llama3.2_3b@2x4096-kept-eager", "a100", "bfloat16", 8192 / 7075, "7,075 tokens/s, 60.0 GiB", TUNE),
        *(1, 60.0 * GIB, f"{OWN_ATTENTION}; {EAGER}"),
    ),
    "Llama 3.2 3B, packed, compiled": Run(
        *("llama3.2_3b@2x4096-kept-eager", "a100", "bfloat16", 8192 / 8998, "8,998 tokens/s, 51.0 GiB", TUNE),
        *(1, 51.0 * GIB, f"{OWN_ATTENTION}; {EAGER}"),
        group=OTHER,
    ),
    "Llama 3.2 3B, packed, compiled, loss in chunks": Run(
        *("llama3.2_3b@2x4096-kept", "a100", "bfloat16", 8192 / 9174, "9,174 tokens/s, 42.9 GiB", TUNE),
        *(1, 42.9 * GIB, OWN_ATTENTION),
        group=OTHER,
    ),
    "Llama 3.2 3B, packed, compiled, loss in chunks, recomputed": Run(
        *("llama3.2_3b@2x4096", "a100", "bfloat16", 8192 / 7210, "7,210 tokens/s, 24.9 GiB", TUNE),
        *(1, 24.9 * GIB, OWN_ATTENTION),
        group=OTHER,
    ),
    "Llama 2 7B, LoRA, 1 x 1304": Run(
        *("llama2_7b_lora8@1x1304", "a100-40gb", "bfloat16", None, "21.30 GB", LIT, 1, 21.30, HUB),
    ),
    "Llama 2 7B, LoRA, 2 x 1304": Run(
        *("llama2_7b_lora8@2x1304", "a100-40gb", "bfloat16", None, "29.07 GB", LIT, 1, 29.07, HUB),
    ),
    "Llama 2 13B, LoRA, 1 x 1304": Run(
        *("llama2_13b_lora8@1x1304", "a100-40gb", "bfloat16", None, "38.12 GB", LIT, 1, 38.12, HUB),
    ),
    "Llama 3.2 1B, LoRA, 1 x 512": Run(
        *("llama3.2_1b_lora32@1x512", "a10", "bfloat16", None, "4.49 GB", LIT_HUB, 1, 4.49, A10G),
    ),
    "Llama 3.2 3B, LoRA, 1 x 512": Run(
        *("llama3.2_3b_lora32@1x512", "a10", "bfloat16", None, "9.67 GB", LIT_HUB, 1, 9.67, A10G),
    ),
    "Llama 3 8B, LoRA, 1 x 512": Run(
        *("llama3_8b_lora32@1x512", "a10", "bfloat16", None, "19.73 GB", LIT_HUB, 1, 19.73, A10G),
    ),
    "Llama 2 7B, LoRA, 2 x 512": Run(
        *("llama2_7b_lora32@2x512", "a10", "bfloat16", None, "19.77 GB", LIT_HUB, 1, 19.77, A10G),
    ),
    "Mistral 7B, LoRA, 2 x 512": Run(
        *("mistral_7b_lora32@2x512", "a10", "bfloat16", None, "20.66 GB", LIT_HUB, 1, 20.66, A10G),
    ),
    "TinyLlama 1.1B, LoRA, 8 x 512": Run(
        *("tinyllama_1b_lora32@8x512", "a10", "bfloat16", None, "13.50 GB", LIT_HUB, 1, 13.50, ON_ALL),
    ),
    "TinyLlama 1.1B in full, 4 x 512": Run(
        *("tinyllama_1b_lora0@4x512", "a10", "bfloat16", None, "14.10 GB", LIT_HUB, 1, 14.10, A10G),
    ),
    "Gemma 2B, LoRA, 2 x 512": Run(
        *("gemma_2b_lora8@2x512", "a10", "bfloat16", None, "12.62 GB", LIT_HUB, 1, 12.62, ON_ALL),
    ),
}
RUNS |= MEMORY

HESPAS = "imec-int/hespas at c45bb55 (arXiv:2604.12090)"
HESPAS_LLAMA = f"{HESPAS}, experiments/ispass_2026/refs/llama3_train.csv, docs/tutorials/ispass_2026_workshop.rst"
HESPAS_RESNET = f"{HESPAS}, experiments/ispass_2026/refs/resnet_train.csv, tests/fixtures/mlir"
HUNDREDTH = "the source rounds to a hundredth of a second"
# The measured runs of Hespas's authors, added before the first of them was compiled. Of its Llamas only the sizes of
# the smallest are in the source, and of its residual networks only ResNet-50's program, of 256 images a device; its
# TPU v3 is no target.
PEER = {
    **{
        f"Hespas, Llama of 100M, 4 {chip.upper()}": Run(
            *("hespas_100m", f"{chip}x4", "bfloat16", seconds, f"{seconds} s", HESPAS_LLAMA, 4, None, HUNDREDTH),
            group=XLA,
        )
        for chip, seconds in {"a100-40gb": 0.09, "h100": 0.04, "h200": 0.03, "b200": 0.02}.items()
    },
    "Hespas, ResNet-50, 4 A100-40GB": Run(
        *("resnet50_256", "a100-40gbx4", "mixed_float16", 0.10, "0.10 s", HESPAS_RESNET, 4, None, HUNDREDTH),
        group=XLA,
        strategy="data",
    ),
}
RUNS |= PEER

YX = "yxanul/yxTPU results/%s/train.log, benchmarks/maxtext_v6e_%s.yml"
# MaxText with the versions of JAX and libtpu that compile here, data parallel, added before the first was compiled: the
# step, what the source calls it, its configuration, seconds, and what XLA says that it needs, in GiB.
XLA_MEMORY = {
    f"{'Llama' if of == '272m' else 'Llama with groups'} of 0.27B, {rows} x {length}, 8 v6e": Run(
        *(f"yx_{of}@{rows}x{length}-logits", "v6e-8", "mixed_bfloat16", seconds, f"{seconds} s, {need} GiB"),
        *(YX % (folder, "272m" if of == "272m" else "modern_270m"), 8, need * GIB),
        f"{OWN_PRODUCTS}; {TWO_KERNELS if of == '272m' else ONE_KERNEL}",
        group=XLA,
        strategy="data",
    )
    for of, rows, length, folder, seconds, need in (
        ("272m", 8, 2048, "v6e8-llama-272m-s2048-b8-20260720T104542Z", 0.129145, 14.8),
        ("272m", 16, 2048, "v6e8-llama-272m-s2048-b16-20260720T104714Z", 0.238250, 24.6),
        ("270m", 16, 2048, "v6e8-modern-270m-adamw-s2048-b16-20260720T111528Z", 0.242244, 23.0),
        ("270m", 8, 2048, "v6e8-modern-270m-adamw-matched-s2048-b8-20260720", 0.130563, 14.0),
        ("270m", 4, 4096, "v6e8-seq-attn-t4096", 0.152418, 14.7),
        ("270m", 2, 8192, "v6e8-seq-attn-t8192", 0.196549, 15.7),
        ("270m", 1, 16384, "v6e8-seq-attn-t16384", 0.288765, 17.8),
        ("270m", 1, 32768, "v6e8-seq-attn-t32768", 0.978308, 35.0),
    )
}
RUNS |= XLA_MEMORY


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


SET_ASIDE = frozenset(name for new in (ADDED, PEER, XLA_MEMORY) for name in sorted(new, key=_hash)[: len(new) // 4])


def predicted(result: dict[str, Any]) -> float:
    """The predicted seconds of a run that was compiled, by rule 13."""
    return result.get("flash", result["seconds"])


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of each run that was compiled, the predicted time divided by the published."""
    compiled = {name: result for name, result in results.items() if name in RUNS and "failed" not in result}
    return {
        name: predicted(compiled[name]) / run.seconds
        for name, run in RUNS.items()
        if name in compiled and run.seconds is not None
    }


def error(ratio: float) -> float:
    """How far a ratio is from 1, whichever of the two is larger: 0.5 and 2 are equally wrong."""
    return max(ratio, 1 / ratio) - 1
