"""The page of predictions: published steps beside what `inspect` predicts of them, made from predictions.json."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner import published_runs
from benchmarks.planner.published_runs import (
    LAMBDAS,
    LIMIT,
    NONE,
    OTHER,
    RUNS,
    SET_ASIDE,
    XLA,
    error,
    predicted,
    ratios,
)
from benchmarks.planner.trust_page import trust
from keras_mp.precision.chips import parse_target

Results = Mapping[str, dict[str, Any]]
# What is to be reached: median and worst error of the time of runs that XLA compiled, and of memory.
TIME, MEMORY, FASTER_AIM = (0.10, 0.60), (0.10, 0.25), (0.15, 0.15)
# Pairs of runs whose ratio is the speed-up of a precision.
FASTER = (
    ("ResNet-50 v1.5, TF32", "ResNet-50 v1.5, AMP"),
    ("ResNeXt-101, TF32", "ResNeXt-101, AMP"),
    ("SE-ResNeXt-101, TF32", "SE-ResNeXt-101, AMP"),
    ("EfficientNet-B0, TF32", "EfficientNet-B0, AMP"),
    ("BERT-large, SQuAD, TensorFlow, TF32", "BERT-large, SQuAD, TensorFlow, FP16"),
    ("BERT-large, SQuAD, TensorFlow 2, TF32", "BERT-large, SQuAD, TensorFlow 2, FP16"),
    ("Llama 3.1 70B, v7x-64", "Llama 3.1 70B, FP8, v7x-64"),
    ("ResNet-50 v1.5, PyTorch, TF32", "ResNet-50 v1.5, PyTorch, AMP"),
    ("BERT-large, SQuAD, TF32", "BERT-large, SQuAD, FP16"),
    ("ResNet-50 v1.5, Paddle, TF32", "ResNet-50 v1.5, Paddle, AMP"),
    ("ResNet-50 v1.5, MXNet, TF32", "ResNet-50 v1.5, MXNet, AMP"),
    ("Llama 3 8B, bfloat16, 8 H100", "Llama 3 8B, FP8, 8 H100"),
    ("Llama 3 8B, bfloat16, 8 B200", "Llama 3 8B, FP8, 8 B200"),
    *((f"BERT-large, SQuAD, TF32, {of[0]}", f"BERT-large, SQuAD, FP16, {of[0]}") for of in LAMBDAS),
)
GROUPS = {XLA: "Compiled by XLA", OTHER: "Compiled by something else", NONE: "Not compiled"}

WORST = """\
From the kernels that `inspect` lists, added up over all blocks; the least at the peak is what the operations take.

| run | kernels | predicted | least at the peak |
| --- | --- | --- | --- |
| BERT-large, SQuAD, TensorFlow 2, TF32: 866 ms published, 453 predicted | products of dense layers | 248 ms | 170 ms |
| | products of attention | 42 ms | 11 ms |
| | all others | 164 ms | - |
| gala-85M, v5e-256: 180 ms published, 93 predicted | products of attention | 61 ms | 9 ms |
| | products of dense layers and of the loss | 20 ms | 16 ms |
| | all others, and uncovered collectives | 13 ms | - |
| EfficientNet-B0, TF32: 423 ms published, 165 predicted | convolutions | 57 ms | 8 ms |
| | all others | 108 ms | - |

- **BERT-large** at the source reaches 34 TFLOP/s, 22% of the peak of TF32. The table is headed "Throughput - FP32" and
  says that it was measured on V100s: neither is so, as float32 without tensor cores has 19.5 TFLOP/s at its peak there,
  and the same README has 11.1 sequences/s of a V100. The 8 GPUs of the next row are as slow, 42.7 sequences/s each. The
  README contradicts itself: the same program on the same GPU in TF32 pretrains on 54.9 sequences/s of 512 tokens, with
  a layer that this step has not, and fine-tunes on 43.9 of 384, 0.60 of the tokens a second; in FP16 both make as many,
  within 4%. A step that ran without XLA would explain it; the script that is there asks for XLA in both.
- **gala-85M** takes seven times what its operations take at the peak, at the source, with 4,096 tokens a chip. Heads of
  64 features fill half of the 128 columns of a v5e's matrix unit, which is counted; libtpu's own cycles
  come to 112 ms. The rest is not in the program of one chip: it is a step of 256 chips on many hosts that read text.
  Such a step, of less than 0.1 s on several hosts, is given no time since 29 November.
- **EfficientNet-B0** is limited by memory: its arrays take 125 of 165 ms at the bandwidth's peak, its operations 8. The
  source spends 423 ms on the same images, and 148 ms on as many in 16 bits, which move half the bytes: bytes alone do
  not make a factor of 2.9. Its 48 depthwise convolutions, of one channel a group, are compiled with channels first, and
  take 23 ms by their bytes, of which float32's own rate needs 5. They would have to take twelve times as long to
  explain the source. No public text has such times on an A100: PyTorch's pull request 58749 has more than a thousand in
  a spreadsheet that could not be opened here. The moving average of the weights at the source is not compiled.
"""
PEAKS = """\
The peaks of torchao and torchtitan are what PyTorch's allocator has reserved of the GPU, in GiB (torchtitan logs
`max_reserved_gib`), which is more than the arrays take at any time. Those of torchtune and LitGPT are what arrays
take. Each row is compiled as its source states it:

- LitGPT's with flash attention and a loss in chunks, as KerasHub's model after `make_lean`.
- torchtitan's and torchao's with all logits at once, and blocks of which the result of attention and every second
  product are kept, which Keras cannot say, by a policy of JAX (`benchmarks/selective.py`). Of a product in FP8 that is
  the result in 16 bits. Before, it was the float32 sums from which the result is scaled, and FP8 kept 10 GB more than
  bfloat16; now both keep as much, as at the source.
- Where the source does not compile its loss, the loss has the arrays of PyTorch's (`benchmarks/eager_loss.py`):
  torchtitan compiles it since April 2025, so that the rows on H100 have them and those on B200 do not; torchtune
  compiles it, and drops what the compiler returns. With XLA's own loss the rows in bfloat16 were at 0.67 to 0.88.

What PyTorch holds besides is not modelled: FSDP2 leaves the embedding, the output layer and the last block gathered,
2.5 GB of Llama 3 8B in bfloat16, and its allocator rounds and keeps what it has freed.
torchtitan's list of what is kept names no product in FP8. By the list FP8 would keep 12 GB less than bfloat16, but the
published peaks of the two are within 1% of each other in all three pairs; both are compiled with the same policy.
"""
FOLLOWS = """\
- **A TPU's products read at the rate of copies.** MaxText 32B on v5e was the worst of this group, at 1.43: products at
  15.2 s where the peak allows 10.8, published 12.1. Products had 0.435 of the bandwidth, which was fitted to products
  of 128 to 32,768 rows, of which those of 1,024 decide: there the wait for the first tiles counts, and not the
  bandwidth. Google's table of copies on TPU7x says 0.87. With the wait as a constant of its own both tables are met to
  1%, products take 11.3 s, and the row is at 1.03. It had the wrong model, too: the figure of October 2023 belongs to
  the decoder of that day, with a ReLU and two products a branch, of as many operations as today's.
- **Sizes that a matrix unit pads.** JAX's `tpu_info.py` has the side of each TPU's matrix unit, and Google's *How to
  Scale Your Model* says that smaller axes are padded to it. libtpu's own cycles agree: of 16 products of 4,096 x 4,096
  by 4,096 x n, n = 64 takes 0.97 of the cycles of n = 128 on a v5e, and n = 128 takes 0.89 of those of n = 256 on a
  TPU7x. Taken by its sources, before a run was scored with it. Of the rows, gala-85M goes from 0.49 to 0.52, gala-1B
  from 0.85 to 0.86, and Llama 3.1 70B on v7x from 0.86 to 0.94; those whose sizes are multiples keep their time.
- **Collectives by XLA's table.** XLA measured collectives on 8 H100 (`collective_interpolator_data.h`): a start of 37
  us, and 0.77 of NVLink's peak. Taken by its source, before a run was scored with it. Most stay covered: of fuji-7B
  with 64K tokens 18.5 ms are uncovered where 10.5 were, of 933 ms, and its ratio goes from 0.84 to 0.85.
- **Flash attention.** Where the source states it, the step is compiled with the kernel that its chip has, as
  `inspect` compiles every step now: Splash on TPUs, cuDNN's on GPUs. Elsewhere its scores are in memory. "Scores in
  memory" is what it predicted before, and "ratio before" that with the bytes of the scores left out. Llama 2 7B on H100
  goes from 0.87 to 0.78: cuDNN's kernel is timed at 0.52 of the peak. Beside Splash's backward kernels is a product of
  vectors, row by row, which was first taken for one that fills a matrix unit. All rows that were compiled again are
  taken at the stage of rule 15, LitGPT's and the recomputed one of Llama 3.2 3B, too.
- **What of a block is kept** cannot be said in Keras, but by a policy of JAX (`benchmarks/selective.py`). The recipes
  of Llama 3.1 70B on v7x keep queries, keys, values and the result of attention, and take one backward kernel, which
  computes the scores once. Compiled so, its rows go from 1.12 to 1.05, and in FP8 from 1.30 to 1.20. Of the other rows
  whose source keeps some products, each block is recomputed, or none.
- **A fault: masks in steps on several chips.** There the table that says which blocks of scores a mask leaves was not
  read, so that Splash's operations were those of all blocks: twice too many of a causal mask. A forward kernel that is
  not needed counted, too. Mended, Llama 3.1 70B on v7x goes from 1.05 to 0.89, in FP8 from 1.20 to 0.96, Llama 2 70B on
  v6e from 0.89 to 0.84, and MaxText's from 0.87 to 1.12 are at 0.86 to 1.10: the median error of the 58 rises from
  11.6% to 12.2%.
- **Softmax on a TPU's vector units.** axlearn's times of Splash on a v5p (`tpu_attention_benchmark.py`, 40 to 110
  heads of 128 features) are those of 9.76 operations of its vector units for a score in each product, within 18%,
  forward as well as backward. So many are counted, at the rate that the adders of *How to Scale Your Model* give
  beside the matrix units: a v6e, whose matrix units are four times as large, attends at a fifth of its peak with heads
  of 128 features. The median error goes from 12.2% to 9.7%, Llama 2 70B on v6e from 0.84 to 0.91 and GPT-3 175B from
  0.87 to 0.90. On v5e and v5p nothing changes, as MaxText's own decoder has heads of 256. The book ends at v6e; on
  v7x, where it is not counted, it would take Llama 3.1 70B to 1.00, and in FP8 to 1.12.
- **Runs that no constant had seen.** Eight runs of MaxText on 8 v6e, with the versions of JAX and libtpu that compile
  here, were added before the first was compiled. As the kit was then they were at 0.86 to 1.19; with the fault mended
  at 0.69 to 1.05, the worse the longer their sequences; with the vector units at 0.87 to 1.10, with no order. No
  constant comes from them, but that the vector units are counted was decided when they were known. Without the eight
  the median error of the other 50 is 10.2%.
- **Rates under load** were tried, and not taken. XLA's table of an H100, which decides its constant, has 0.82 of the
  peak in 16 bits; of normally distributed values SemiAnalysis reports 720 TFLOP/s, 0.73 (*MI300X vs H100 vs H200
  Benchmark Part 1*, December 2024). Azure's guide has an A100 SXM with random values after 10,000 runs
  (github.com/Azure/AI-benchmarking-guide, ND_A100_v4_results.md): 0.82, where the constant is 0.73, mostly of a card
  that draws 250 W. Estimated by the products of each row, the median error would be 9.1% with the H100's alone, 10.0%
  with the A100's alone, and 9.5% with both, as without (all before v6e was timed anew). They belong together, and then
  the rows on A100, which are predicted too fast already, lose what those on H100 gain.
- **The rates of GPUs.** They were those of products in PyTorch, and rows on GPUs are predicted too fast more often than
  too slow. XLA has a table of its own (`xla/service/gpu/model/default_matmul_perf_table.txtpb`, H100 and B200), and
  BabelStream ran on both A100s and an H100 NVL. They say that the rates were not too high: of an H100's peak 16 bits
  reach 0.82 where it was 0.78, TF32 0.71 where it was 0.79, and other kernels 0.83 of the bandwidth, on an A100 0.86,
  where it was 0.86 and 0.82. With these constants alone the median error of the 24 runs on GPUs that were compiled by
  then rose from 19.4% to 22.4%; they stay, as the tables are wider. XLA's products in FP8 reach 2,620 TFLOP/s on an
  H100, beyond its peak, and are not taken.
- **The start of a kernel.** XLA's cost model adds 1 us for the launch of each kernel (`kKernelLaunchOverhead`). With it
  the error of the 29 runs on GPUs is 13.6% where it is 14.4%, and the worst is 154%. It is not taken: the smallest
  kernel of the tables takes 5 us, its launch among them, and would have it twice.
- **Arithmetic in other kernels.** A GELU, a softmax and the random numbers of dropout compute more than an H100 or an
  A100 can hide behind the bytes: XLA's table of cycles (`hlo_op_profiles_data.h`) has a tanh as long as 17 additions,
  an exponential as long as 11. Counted so, at one addition a cycle of a lane, they take the error of those 24 runs
  from 22.4% to 16.5%: BERT-large in FP16 goes from 0.70 to 0.80 and from 0.75 to 0.89, BERT base on JAX from 0.83 to
  0.91. On TPUs it is not counted. Google's *How to Scale Your Model* has the adders of the vector unit, 2 of a lane on
  v4 and 4 from v5, but no public text has what an exponential or a division takes outside of attention. With one
  addition for each operation gala-1B is 0.1% longer, gala-85M 0.4%, GPT-3 175B 1%, and Llama 3.1 70B on v7x, whose
  scores move no bytes, 7%.
- **The layout of convolutions.** XLA compiles them with channels last in 16 bits, and with channels first in float32.
  Tensor cores take channels last, and the library transposes others in kernels that the compiled step does not show: in
  a profile of TF32 convolutions on an A100 they take 32% of the time beside 59% for the convolutions
  (github.com/pytorch/pytorch issue 81940). Channels first therefore take the share of the rate of products that the
  tables of V100 and T4 give, and channels last count as products. The bytes of two transposes in its place fit these
  tables worse: convolutions that memory limits would take twice their measured time. On Hopper and on a B200, XLA
  compiles TF32, too, with channels last, which the source has first.
- **Eight GPUs in PyTorch.** The rows of torchao and torchtitan, compiled as their sources have them, are predicted at
  0.49 to 0.72 of the published time: at the source Llama 3 8B reaches a third of the H100's peak, and a fifth of that
  of the B200, whose power is limited; XLA's runs of Llama 2 7B on 8 H100 reach half. They were at 0.81 to 1.29 as an
  older version of the kit had compiled them, without flash attention.
- **Programs that are not compiled** start a kernel for each operation. NVIDIA's programs for PyTorch are predicted too
  fast, the more so the faster a chip multiplies: Lambda's runs on Ampere and Ada at 0.63 to 1.22 of the published time,
  on Hopper at 0.56 to 0.85, on a B200 at 0.41 to 0.74. Of Ampere and Ada, the GPUs that may draw little power are the
  slowest beside their prediction: an A10 (150 W) is at 0.63 to 0.80, an RTX 4090 (450 W) at 0.98 to 1.07. Of the BERTs
  of 512 tokens in PyTorch the source bins the sequences by length, so that what is compiled is more work.

Not modelled: the time between kernels beyond their starts, caches, clocks that fall under load, and on TPUs the
arithmetic of kernels that are neither products nor attention, and collectives slower than their links."""
MISSED = """\
- **Time, the worst error.** BERT-large in TF32 (0.52) and ViT-B/16 on 8 H100 (0.62) are above. The source of BERT-large
  contradicts itself (above), and the same model in TF32 is at 0.85 to 0.98 in three other rows, so that no property of
  the program sets it apart, and it stays. ViT-B/16 on 8 H100 is at the source only 1.6 times as fast as on 8 A100,
  where it is at 0.95; with the rate under load it would be at 0.66. EfficientNet-B0, ResNeXt-101 and SE-ResNeXt-101
  (0.39 to 0.87) have convolutions in groups, and gala-85M (0.52) is a small step on many hosts: they are given no time,
  by rules on the program alone, which were set when these runs were known, so that leaving a source out tests neither.
  honeycrisp-85M is at 1.52: its bound alone, 737 ms, is above the published 670 ms, as its scores are in memory here;
  the source has the model with flash attention and without, and does not say of which its figure is. Tried: rates under
  load; the launch of each kernel (the worst goes from 157% to 154%); padded sizes (gala-85M from 102% to 93%); libtpu's
  cycles for all kernels of a TPU (gala-85M at 0.62, but ten runs at a median error of 31% where rates have 14%, both
  with scores in memory); arithmetic on TPUs by additions alone (gala-85M 0.4% longer); a table of depthwise and grouped
  convolutions on an A100, of which there is none in text: PyTorch's pull request 58749 is a spreadsheet, its issues
  18631, 70954 and 73764 have single layers or other GPUs. Of GPUs alone the median error is 15%. Not tried there: XLA's
  table of cycles of sm_90, where a tanh takes as long as 67 additions, 17 in that of sm_103, which is taken for all;
  and the waves in which a GPU computes the tiles of a product, of which the last is seldom full.
- **Memory.** The eight rows added last, at 0.56 to 0.74 where the others have a median error of 14%, are no peaks:
  MaxText logs JAX's `memory_analysis()`, which has the gaps between a TPU's arrays twice
  (docs/maintainers/what-we-fixed.md, 11j). One logs 35.0 GiB, ran, and its log gives a chip 31.25. They stay scored as
  published. The program differs, too: a plain JAX form of it, with its loop over layers, its loss, its clipping and its
  own kernel (`python benchmarks/planner/scanned_layers.py --maxtext FOLDER`), assigns 10.6 GiB for 8 x 2048, 10.9 for
  4 x 4096, 11.4 for 2 x 8192, 12.4 for 1 x 16384 and 24.8 for 1 x 32768, where the rows have 9.9, 9.9, 9.9, 10.0 and
  20.6, and the source logs 14.0, 14.7, 15.7, 17.8 and 35.0. The
  growth with the length is of its kernel, which writes the gradient of queries once for each 512 keys, in float32 from
  five such blocks on: 0.0625 GiB a block for 16,384 tokens, as assigned; the log grows by twice that, 0.13, as gaps
  counted twice would. Compiled to the end, that form of the model of 12 layers, 8 x 2048, has 12.9 GiB by
  `memory_analysis()`, of which 11.1 are assigned (the row has 10.0, the source logs 14.8): gaps counted twice are 1.8.
  The last 1.9 are not explained: the source's flags of libtpu add 0.1, the clipping 0.1, and JAX's logsumexp in the
  place of its loss 1.6. LitGPT's rows, compiled again with attention's kernel, are at 0.85 to 1.15 but for three (0.59
  to 0.72), of which two have LoRA on every product, with dropout, and KerasHub's on queries and values alone. Tried:
  the loss with the arrays of PyTorch, which takes Llama 3 8B on 8 H100 from 0.70 to 0.80 and Llama 3.2 3B, packed, from
  0.75 to 0.89 (with barriers alone, without the arrays that each is made of, XLA writes a gradient over another, and it
  takes 61.0 GB of Llama 3.1 8B where it takes 68.7 now); products in FP8 that keep 16 bits (B200 from 1.35 to 1.04, as
  much as in bfloat16); GiB for what the sources call GB (0.92 to 1.53 before). What is left there is PyTorch's own:
  without a compiler every operation of a block has its arrays, FSDP2 leaves 2.5 GB gathered, and torchtitan's figures
  are what the allocator has reserved.
- **Speed-up.** The worst is BERT-large of TensorFlow 2, published 3.06, predicted 1.80. The time of the slower
  precision is what is off: in TF32 BERT-large of TensorFlow 2 (0.52), EfficientNet-B0 (0.39), ResNeXt-101 (0.65).
  Tried: rates of TF32 of their own, fitted to its own tables; the share of convolutions with channels first; the
  bytes of their transposes, which fit the tables worse; and arithmetic by XLA's cycles, which counts the same in both
  precisions."""
TEXT = """# Predicted and published training steps

{summary}

{aims}

`inspect` predicts the time of a step from the kernels that the chip's compiler makes of it. This page compares such
predictions with published runs, in three groups by what made the kernels at the source. Reports quote the first. No
chip was attached. A ratio is predicted divided by published; its error is how far the larger of the two is from the
smaller: ratios of 0.5 and of 2 both have an error of 100%. Products, other kernels and uncovered collectives are the
three parts of the predicted time; the bound is the time at the chip's peak rates, which no program reaches. Where the
source states flash attention, the step is compiled with the kernel of the chip; "scores in memory" and "ratio before"
are from before that was possible. The column "compile" is the time that the row took to compile, on one core which
other work shared.

{trust}

## Compiled by XLA

{xla}

{by_chip}

{failures}

## Why the three worst are off

{worst}

## What follows

{follows}

## Aims that are missed

{missed}

## Memory

{memory}

## Compiled by something else

{other}

## Not compiled

{none}

## Speed-up of a precision

{faster}

## Fewer blocks than the model has

{depths}

## On this machine's CPU

{cpu}

## Which runs are taken

{rules}

## How the time is predicted

- A matrix product or convolution takes `start + sqrt(computing^2 + moving^2)`: its operations at a share of the peak,
  and its bytes at a share of the memory's bandwidth. TF32, 16 bits and FP8 have a share of their own, and a convolution
  with channels first a share of that of products.
- On a TPU a product also waits for its first tiles and its last results: 15.2 MB at the memory's bandwidth, or all its
  bytes where they are fewer. Its other bytes cross at the rate of copies, of which Google has a table.
- On a TPU attention takes no less than its vector units need for the scores: 9.76 operations of each, in each of its
  products, where their rate is known.
- On a TPU the three sizes of a product are padded to the side of its matrix unit: 128, on v6e and v7x 256
  (`keras_mp/planner/time/step_time.py`, with the sources).
- Another kernel takes `start + sqrt(computing^2 + moving^2)`. What it computes counts on NVIDIA's GPUs alone: each
  operation as so many additions as its cycles in XLA's table are those of an addition, of which a lane does one a cycle
  (`keras_mp/planner/time/arithmetic.py`).
- Kernels run one after another in the compiled order. A collective that starts and ends apart, or that a TPU runs in
  steps, runs beside the kernels between; what remains of it is uncovered. On NVIDIA's GPUs a collective takes a start
  and its bytes at a share of the links' bandwidth, by XLA's table for 2, 4 and 8 H100; a TPU's links run at their peak.
- On a TPU, an array that stays in the core's own memory moves no bytes; one that a copy brings there ahead counts where
  it is read. The time and the bound count the same kernels and bytes, so a time is never below its bound
  (`tests/planner/test_step_time.py::test_a_time_is_never_below_its_bound`).

The shares and the starts are constants of a chip's generation, in `keras_mp/planner/time/step_time.py`.
`benchmarks/planner/fit_efficiency.py` fits them to published measurements of products, convolutions, memory bandwidth
and collectives (`benchmarks/planner/efficiency_tables.json`, with sources): Google's tables of products and of copies
for TPU7x, axlearn's of Splash on a v5p, DeepBench for V100 and T4, XLA's own tables for H100 and B200, square products
in TF32 and 16 bits in PyTorch on A100, H100 and B200, the maximum achievable rates of Bekman's *Machine Learning
Engineering*, the tables of Transformer Engine, BabelStream, and other measurements of bandwidth. No training step is
among them (`tests/planner/test_efficiency.py::test_constants_are_fitted_to_the_tables`), and no constant changes when
a run is taken out (`test_no_constant_changes_when_a_scored_run_is_taken_out`). What a generation's tables do not
determine it takes from another: A100, H100 and B200 take the share of convolutions from the V100, the A100 also that
of the bandwidth in products, and a B200 that of other kernels; GPUs between, such as an L4 or an RTX 4090, take the
constants of the A100; TPUs before v6e take those of v6e.

## What the page costs

{costs}

## Sources

{sources}

`python benchmarks/planner/predictions.py --markdown docs/tables/predictions.md`, compiled {dates} with jax {jax}.
One run is one entry of `benchmarks/planner/predictions.json`.
"""


# What depths.json compares, and how the page writes it.
_DEPTHS = {
    "time": "time of a step",
    "products": "of it, products",
    "other": "of it, other kernels",
    "uncovered": "of it, uncovered collectives",
    "memory": "peak memory of a device",
    "temporary": "of it, temporary",
}


def page(results: Results) -> str:
    """The page, from the results that are there."""
    compiled = {name: result for name, result in results.items() if "failed" not in result}
    dates = sorted({result["date"] for result in results.values()})
    return TEXT.format(
        summary=_summary(compiled),
        aims=_aims(compiled),
        trust=trust(compiled),
        xla=_runs(compiled, XLA),
        by_chip=_by_chip(compiled),
        failures=_failures(results),
        worst=WORST,
        follows=FOLLOWS,
        missed=MISSED,
        memory=_memory(compiled),
        other=_runs(compiled, OTHER),
        none=_runs(compiled, NONE),
        faster=_faster(compiled),
        depths=depths(),
        cpu=cpu(),
        rules=_rules(),
        costs=_costs(compiled),
        sources="\n".join(f"- {name}: {run.figure}. {run.source}" for name, run in RUNS.items()),
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        jax=", ".join(sorted({result["versions"]["jax"] for result in compiled.values()})),
    )


def _of(compiled: Results, names: Iterable[str]) -> dict[str, float]:
    """The ratios of some runs."""
    wanted = set(names)
    return {name: ratio for name, ratio in ratios(dict(compiled)).items() if name in wanted}


def _score(of_runs: Mapping[str, float]) -> tuple[float, float, str]:
    """The median and the worst error, and the name of the run that is worst."""
    errors = {name: error(ratio) for name, ratio in of_runs.items()}
    worst = max(errors, key=errors.__getitem__)
    return statistics.median(errors.values()), errors[worst], worst


def _chip(name: str) -> Any:
    return parse_target(RUNS[name].target)[0]


def _given(compiled: Results) -> dict[str, float]:
    """The ratios of the runs that XLA compiled and that are given a time."""
    rows = _of(compiled, (name for name, run in RUNS.items() if run.group == XLA))
    return {name: ratio for name, ratio in rows.items() if not compiled[name].get("unscored")}


def _summary(compiled: Results) -> str:
    every = _of(compiled, (name for name, run in RUNS.items() if run.group == XLA))
    scored = _given(compiled)
    median, most, worst = _score(scored)
    chips = {_chip(name).name for name in scored}
    tpus = [name for name in scored if _chip(name).vendor == "google"]
    on_tpus, _, _ = _score(_of(compiled, tpus))
    on_gpus, _, _ = _score(_of(compiled, set(scored) - set(tpus)))
    within = sum(error(ratio) <= TIME[1] for ratio in scored.values())
    aside = _of(compiled, SET_ASIDE)
    middle, worst_aside, _ = _score(aside)
    return (
        f"Of {len(every)} published training steps that XLA compiled, {len(every) - len(scored)} are given no time "
        f"(with one the worst would be {_score(every)[1]:.0%} off). Of the other {len(scored)}, on {len(chips)} chips, "
        f"{len(tpus)} of them on TPUs of {len({_chip(name).name for name in tpus})} generations, the predicted time "
        f"has a median error of **{median:.0%}** (on TPUs {on_tpus:.0%}, on GPUs {on_gpus:.0%}); {within} are within "
        f"{TIME[1]:.0%}, and the worst is {most:.0%} off, {worst}, at {scored[worst]:.2f} times the published time. Of "
        f"the {len(aside)} that were set aside, a quarter of those added last, the median error is {middle:.0%} and "
        f"the worst {worst_aside:.0%}."
    )


def _aims(compiled: Results) -> str:
    """What was to be reached, what was, and by how much it is missed."""
    time = _score(_given(compiled))
    peaks = [error(ratio) for ratio in _peaks(compiled).values()]
    faster = [error(expected / published) for _, published, expected in _pairs(compiled)]
    aims = [
        ("time of runs that XLA compiled, median error", time[0], TIME[0]),
        ("time of runs that XLA compiled, worst error", time[1], TIME[1]),
        ("memory, median error", statistics.median(peaks), MEMORY[0]),
        ("memory, worst error", max(peaks), MEMORY[1]),
        ("speed-up, median error", statistics.median(faster), FASTER_AIM[0]),
        ("speed-up, worst error", max(faster), FASTER_AIM[1]),
    ]
    rows = [
        (name, f"{aim:.0%}", f"{reached:.0%}", f"missed by {reached - aim:.0%}" if reached > aim else "reached")
        for name, reached, aim in aims
    ]
    return table(("", "aim", "error", ""), rows)


def _runs(compiled: Results, group: str) -> str:
    """The rows of a group, under its score."""
    names = [name for name in RUNS if name in compiled and RUNS[name].group == group and RUNS[name].seconds is not None]
    if not names:
        return "No run of this group was compiled."
    median, most, _ = _score(_of(compiled, names))
    columns = (
        "run",
        "chips",
        "published",
        "predicted",
        "ratio",
        "scores in memory",
        "ratio before",
        "products",
        "other",
        "uncovered",
        "bound",
    )
    rows = [_row(name, compiled[name]) for name in names]
    return f"{len(names)} runs, median error {median:.0%}, worst {most:.0%}.\n\n" + table(
        (*columns, "compile", "compiled"), rows
    )


def _row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    run = RUNS[name]
    parts = (result[part] for part in ("products", "other", "uncovered", "bound"))
    target = result.get("target", run.target)
    before = result if "flash" in result else result.get("before")
    how = [
        "not compiled with the kernel, the scores left out" if "flash" in result else "",
        ", ".join(result["blocks"]),
        f"for {target}" if run.chips > 1 and str(run.chips) not in target else "",
        "no time is given" if result.get("unscored") else "",
        f"as {result['compiled as']}" if "compiled as" in result else "",
        "to the stage of its memory" if result.get("stage") else "",
        *(f"larger form {outcome}" for outcome in result.get("tried", ())),
        run.note,
    ]
    assert run.seconds is not None
    return (
        f"{name} (set aside)" if name in SET_ASIDE else name,
        f"{run.chips} {_chip(name).name}",
        _time(run.seconds),
        _time(predicted(result)),
        f"{ratios({name: result})[name]:.2f}",
        _time(before["seconds"]) if before else "-",
        f"{before['flash'] / run.seconds:.2f}" if before else "-",
        *map(_time, parts),
        "-" if "compiled as" in result else f"{_took(result):.0f} s",
        "; ".join(filter(None, how)) or "whole",
    )


def _took(result: Mapping[str, Any]) -> float:
    """The seconds that a run took to compile: of its process where they are known, and else of the compiler."""
    return result.get("wall seconds", result["compile seconds"])


def _by_chip(compiled: Results) -> str:
    """The ratios of the runs that XLA compiled, by the chip."""
    groups: dict[str, list[float]] = {}
    for name, ratio in _of(compiled, (name for name, run in RUNS.items() if run.group == XLA)).items():
        groups.setdefault(_chip(name).title, []).append(ratio)
    rows = [
        (title, str(len(of_chip)), f"{statistics.median(of_chip):.2f}", f"{min(of_chip):.2f} to {max(of_chip):.2f}")
        for title, of_chip in groups.items()
    ]
    return table(("chip", "runs", "median ratio", "ratios"), rows)


def _failures(results: Results) -> str:
    """The runs of the list that were not compiled, each with the reason."""
    failed = {name: results[name]["failed"] for name in RUNS if name in results and "failed" in results[name]}
    waiting = [name for name in RUNS if name not in results]
    if not failed and not waiting:
        return "All runs of the list were compiled."
    said = [f"- {name}: {reason}." for name, reason in failed.items()]
    said += [f"- Not compiled yet, for want of time: {'; '.join(waiting)}."] if waiting else []
    untried = f", and {len(waiting)} were not tried yet" if waiting else ""
    return (
        f"Of the {len(RUNS)} runs of the list, {len(failed)} failed in every form that the rules name{untried}. They "
        "have no ratio, and count in no median.\n\n" + "\n".join(said)
    )


def _peaks(compiled: Results) -> dict[str, float]:
    """Of each run with a published peak of memory, the predicted divided by it."""
    return {
        name: compiled[name]["bytes"] / 1e9 / run.gigabytes
        for name, run in RUNS.items()
        if run.gigabytes and name in compiled
    }


def _memory(compiled: Results) -> str:
    peaks = _peaks(compiled)
    rows = [
        (
            name,
            RUNS[name].group,
            f"{RUNS[name].gigabytes:.2f}",
            f"{compiled[name]['bytes'] / 1e9:.2f}",
            f"{ratio:.2f}",
            RUNS[name].note,
        )
        for name, ratio in peaks.items()
    ]
    errors = [error(ratio) for ratio in peaks.values()]
    ran = [
        name
        for name, run in RUNS.items()
        if run.group == XLA and name in compiled and parse_target(run.target)[1] == run.chips
    ]
    fits = sum(compiled[name]["bytes"] <= _chip(name).memory_bytes / _chip(name).devices for name in ran)
    return (
        f"{len(rows)} published peaks: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}. "
        f"{sum(RUNS[name].group == XLA for name in peaks)} are XLA's own figures. Of the {len(ran)} runs that XLA "
        "compiled for as many chips as at the source, where they fitted, "
        f"{fits} fit by the prediction.\n\n{PEAKS}\n"
        + table(("run", "compiled by", "published, GB a device", "predicted", "ratio", ""), rows)
    )


def _pairs(compiled: Results) -> list[tuple[str, float, float]]:
    """Of each pair of runs that was compiled, the faster, and its published and predicted speed-up."""
    return [
        (
            fast,
            _published(slow) / _published(fast) * _growth(slow, fast),
            predicted(compiled[slow]) / predicted(compiled[fast]) * _growth(slow, fast),
        )
        for slow, fast in FASTER
        if slow in compiled and fast in compiled
    ]


def _growth(slow: str, fast: str) -> float:
    """How many times the rows of the slower run the faster has in a step."""
    return RUNS[fast].rows / RUNS[slow].rows


def _faster(compiled: Results) -> str:
    slower = {fast: slow for slow, fast in FASTER}
    rows = []
    for fast, published, expected in _pairs(compiled):
        slow = slower[fast]
        growth = _growth(slow, fast)  # the time saved is that of a step of the faster run
        saved = [compiled[slow][part] * growth - compiled[fast][part] for part in ("products", "other")]
        row = (fast, f"{published:.2f}", f"{expected:.2f}", f"{expected / published:.2f}")
        rows.append((*row, _time(_published(slow) * growth - _published(fast)), *map(_time, saved)))
    if not rows:
        return "No pair of runs was compiled."
    names = ("run", "published", "predicted", "ratio", "time saved, published", "predicted, products", "other")
    return table(names, rows)


def _published(name: str) -> float:
    seconds = RUNS[name].seconds
    assert seconds is not None
    return seconds


def _rules() -> str:
    """The rules, as the list of the runs has them."""
    text = published_runs.__doc__ or ""
    return text[text.index("A run is taken") :].strip()


def _costs(compiled: Results) -> str:
    """What the page took to compile."""
    own = {name: result for name, result in compiled.items() if "compiled as" not in result and name in RUNS}
    rows = [
        (
            title,
            str(len(of_group)),
            f"{sum(map(_took, of_group)) / 3600:.1f} hours",
            f"{max(map(_took, of_group)):.0f} s",
        )
        for group, title in GROUPS.items()
        if (of_group := [result for name, result in own.items() if RUNS[name].group == group])
    ]
    total = sum(map(_took, own.values())) / 3600
    return (
        f"All {len(own)} compiles together took {total:.1f} hours, on one core which other work shared; the limit of "
        f"one is {LIMIT // 60} minutes.\n\n" + table(("group", "compiles", "together", "the longest"), rows)
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def depths() -> str:
    """The line through few blocks and more against the step with many more."""
    path = Path(__file__).with_name("depths.json")
    if not path.exists():
        return "Not compiled yet: `python benchmarks/planner/depths.py`."
    kept = json.loads(path.read_text())
    few, more, many = kept["blocks"]
    rows = []
    for name, title in _DEPTHS.items():
        line, compiled = kept["line"][name], kept["compiled"][name]
        scale, unit = (1e-9, "GB") if name in ("memory", "temporary") else (1e3, "ms")
        off = f"{line / compiled - 1:+.1%}" if compiled else "-"
        rows.append((title, f"{line * scale:.4g} {unit}", f"{compiled * scale:.4g} {unit}", off))
    return (
        f"Llama 3 8B, bfloat16, fully sharded over 8 H100: the line through the steps with {few} and {more} blocks, at "
        f"{many} blocks, beside the step that was compiled with {many}. `python benchmarks/planner/depths.py`.\n\n"
        + table(("", f"on the line, {many} blocks", f"compiled, {many} blocks", "the line is off by"), rows)
    )


def cpu() -> str:
    """Predictions for this machine's CPU against `keras_mp.bench.benchmark`."""
    path = Path(__file__).with_name("cpu_predictions.json")
    if not path.exists():
        return "Not measured yet: `python benchmarks/planner/cpu_predictions.py`."
    kept = json.loads(path.read_text())
    rows = []
    for name, expected in kept["predicted"].items():
        took, measured, ratio = kept["measured"].get(name), "-", "-"
        if took:
            low, median, high = (f"{took[which] * 1e3:,.0f}" for which in ("low", "median", "high"))
            measured, ratio = f"{median} ms ({low} to {high})", f"{expected['seconds'] / took['median']:.2f}"
        predicted_time, *parts = (f"{expected[part] * 1e3:,.0f} ms" for part in ("seconds", "products", "other"))
        rows.append((name, measured, predicted_time, ratio, *parts))
    return (
        "The three models for a CPU of `benchmarks/peer_workloads.py`, in float32 on JAX, 2 cores. The constants are "
        "fitted to products, convolutions and sums that the command measures on the same CPU, and not to the models. "
        "Measured with `keras_mp.bench.benchmark`: the median of the rounds, with its quartiles. "
        "`python benchmarks/planner/cpu_predictions.py`.\n\n"
        + table(("model", "measured", "predicted", "ratio", "products", "other"), rows)
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ("---", *["---"] * (len(names) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
