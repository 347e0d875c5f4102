"""The page of predictions: published steps beside what `inspect` predicts of them, made from predictions.json."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs import LAMBDAS, RUNS, Run, compiles, error, ratios
from keras_mp.precision.chips import parse_target

GOAL = 15
# Pairs of runs whose ratio is the speed-up of a precision.
FASTER = (
    ("ResNet-50 v1.5, TF32", "ResNet-50 v1.5, AMP"),
    ("ResNet-50 v1.5, PyTorch, TF32", "ResNet-50 v1.5, PyTorch, AMP"),
    ("BERT-large, SQuAD, TF32", "BERT-large, SQuAD, FP16"),
    ("ResNet-50 v1.5, Paddle, TF32", "ResNet-50 v1.5, Paddle, AMP"),
    ("ResNet-50 v1.5, MXNet, TF32", "ResNet-50 v1.5, MXNet, AMP"),
    ("Llama 3 8B, bfloat16, 8 H100", "Llama 3 8B, FP8, 8 H100"),
    ("Llama 3 8B, bfloat16, 8 B200", "Llama 3 8B, FP8, 8 B200"),
    *((f"BERT-large, SQuAD, TF32, {of[0]}", f"BERT-large, SQuAD, FP16, {of[0]}") for of in LAMBDAS),
)

# Parts of the names of sources, and the program that ran there.
PROGRAMS = {
    "keras-io": "Keras, compiled by XLA",
    "maxtext": "MaxText, compiled by XLA",
    "tpu-recipes": "MaxText, compiled by XLA",
    "nanoGPT": "PyTorch, compiled",
    "pytorch/ao": "PyTorch, compiled",
    "Examples TensorFlow": "TensorFlow",
    "Examples PyTorch/Class": "PyTorch, NVIDIA's ResNet-50",
    "Examples PyTorch/Lang": "PyTorch, NVIDIA's BERT-large",
    "Examples Paddle": "Paddle and MXNet, ResNet-50",
    "Examples MxNet": "Paddle and MXNet, ResNet-50",
    "lambdal": "PyTorch, NVIDIA's programs, run by Lambda",
}

CYCLES = """## TPUs, timed both ways

By rates: as the kernels of GPUs. By cycles: each kernel takes the cycles that libtpu estimates for it, at the rate of
Google's tables of products (of v5e, which is in none, at that of its peak), but no less than the chip's peak rates
allow. The way with the smaller median error over the TPUs is taken for all of them: by rates.

"""
SUGGESTS = """The sources print no times of kernels, so what can be compared is the parts. Four causes show.

- **The program of the source is not compiled.** XLA fuses what other programs start as kernels of their own. NVIDIA's
  programs for PyTorch are predicted too fast, the more so the faster a chip multiplies: Lambda's runs on Ampere and Ada
  at 0.63 to 1.24 of the published time, on Hopper at 0.54 to 0.80, on a B200 at 0.41 to 0.62. The worst, ResNet-50 on a
  B200, is hardly slower in TF32 at the source than in 16 bits, 2,967 against 3,076 images/s: products do not limit it.
- **Power.** Of Ampere and Ada, the GPUs that may draw little are the slowest beside their prediction, which takes
  the clock of the data sheet: an A10 (150 W) is at 0.63 to 0.82, an RTX 6000 Ada (300 W) at 0.63 to 0.81, an RTX 3090
  (350 W) at 0.96 to 1.24, an RTX 4090 (450 W) at 0.99 to 1.09.
- **Attention.** The Llamas and MaxText run flash attention at the source. Keras compiled for a chip that is not
  there writes the scores to memory, in kernels that count as products and as others. Of the BERTs of 512 tokens the
  source bins the sequences by length (its changelog of January 2022), and does not say how many tokens are left: what
  is compiled is more work, which is the largest error of the page.
- **The layout of convolutions.** XLA compiles them with channels last in 16 bits, and with channels first in float32.
  Tensor cores take channels last, and the library transposes others in kernels that the compiled step does not show: in
  a profile of TF32 convolutions on an A100 they take 32% of the time beside 59% for the convolutions
  (github.com/pytorch/pytorch issue 81940). The tables of convolutions that were found have channels first, on V100 and
  T4, so channels first take their share of the rate of products, and channels last count as products. On Hopper and on
  a B200, XLA compiles TF32, too, with channels last, which the source has first. A table of channels last, and of an
  A100, is the next step. Tried instead of the share: two transposes of the operands and the result at the bandwidth's
  rate. It fits the tables of V100 and T4 worse (a root mean square of 67% and 71%, with the share 50% and 53%)."""

TEXT = """# Predicted and published training steps

{summary}

{aims}

`inspect` predicts the time of a step from the kernels that the chip's compiler makes of it. This page compares such
predictions with published runs. No chip was attached. A ratio is predicted divided by published; its error is how far
the larger of the two is from the smaller: ratios of 0.5 and of 2 both have an error of 100%.

{runs}

Products, other kernels and uncovered collectives are the three parts of the predicted time. The bound is the time at
the chip's peak rates, which no program reaches.

## Memory

{memory}

## Speed-up of a precision

{faster}

{cycles}

## Where the error is

{precisions}

{programs}

{by_chip}

{suggests}

Not modelled: the time between kernels, caches, collectives slower than their links, clocks that fall under load.

## Fewer blocks than the model has

{depths}

## On this machine's CPU

{cpu}

## Which runs are taken

A run is taken if all of this holds. The first six conditions were written before the first run was compiled, the
seventh before the first of those from Lambda's repository. No run that was compiled is left out.

1. It is a training step whose model, batch, lengths, precision, optimizer and division over devices are in the
   source, or in the program that the source names.
2. `inspect` compiles for its chip.
3. Nothing is kept in the host's memory, and the devices are one host or one slice.
4. Its data do not limit it: synthetic, or loaded beside the step.
5. Kernels that were written by hand (flash attention) and selective recomputation do not exclude a run; the last
   column names them.
6. Where a slice is too large to be compiled here, the same work a chip is compiled for a smaller one.
7. Convolutions in 16 bits have channels last in the source, as XLA compiles them.

Of Lambda's repository are taken ResNet-50 in TF32 and BERT-large on SQuAD in both precisions, on one GPU, with the two
newer containers, of each chip that `inspect` compiles for. Its ResNet-50 in 16 bits has channels first.

{missing}

## How the time is predicted

- A matrix product or convolution takes `start + sqrt(computing^2 + moving^2)`: its operations at a share of the peak,
  and its bytes at a share of the memory's bandwidth. TF32, 16 bits and FP8 have a share of their own, and a convolution
  with channels first a share of that of products.
- Another kernel takes `start + moving`.
- Kernels run one after another in the compiled order. A collective that starts and ends apart, or that a TPU runs in
  steps, runs beside the kernels between; what remains of it is uncovered. Links run at their peak rate.
- On a TPU, an array that stays in the core's own memory moves no bytes; one that a copy brings there ahead counts where
  it is read. The time and the bound count the same kernels and bytes, so a time is never below its bound
  (`tests/xla/test_step_time.py::test_a_time_is_never_below_its_bound`).

The shares and the two starts are constants of a chip's generation, in `keras_mp/xla/step_time.py`.
`benchmarks/fit_efficiency.py` fits them to published measurements of products, convolutions and memory bandwidth
(`benchmarks/efficiency_tables.json`, with sources): Google's table for TPU7x, DeepBench for V100 and T4, square
products in TF32 and 16 bits in PyTorch on A100, H100 and B200, the maximum achievable rates of Bekman's *Machine
Learning Engineering*, the tables of Transformer Engine, and measurements of bandwidth. No training step is among them
(`tests/xla/test_efficiency.py::test_constants_are_fitted_to_the_tables`), and no constant changes when a run is taken
out (`test_no_constant_changes_when_a_scored_run_is_taken_out`). What a generation's tables do not determine it takes
from another: A100, H100 and B200 take the share of convolutions, and of the bandwidth in products, from the V100; TPUs
before v6e take the constants of v6e.

## Sources

{sources}

`python benchmarks/predictions.py --markdown docs/tables/predictions.md`, compiled {dates} with jax {jax}.
One run is one entry of `benchmarks/predictions.json`.
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


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page, from the results that are there."""
    there = {name: run for name, run in RUNS.items() if name in results}
    missing = [name for name in RUNS if name not in results]
    listed = "All runs of the list were compiled."
    if missing:
        listed = f"Tried, and not compiled in 20 minutes on one core, which other work shared: {', '.join(missing)}."
    return TEXT.format(
        summary=_summary(results, there),
        aims=_aims(results, there),
        cycles=_cycles(results, there),
        programs=_programs(results, there),
        by_chip=_by_chip(results, there),
        suggests=SUGGESTS,
        depths=depths(),
        cpu=cpu(),
        runs=table(
            ("run", "chips", "published", "predicted", "ratio", "products", "other", "uncovered", "bound", "compiled"),
            [_row(name, run, results[name]) for name, run in there.items()],
        ),
        memory=_memory(results, there),
        faster=_faster(results),
        precisions=_precisions(results, there),
        missing=listed,
        sources="\n".join(f"- {name}: {run.figure}. {run.source}" for name, run in there.items()),
        dates=" to ".join(
            dict.fromkeys((min(r["date"] for r in results.values()), max(r["date"] for r in results.values())))
        ),
        jax=", ".join(sorted({result["versions"]["jax"] for result in results.values()})),
    )


def _summary(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    errors = {name: error(ratio) for name, ratio in ratios(results).items()}
    worst = max(errors, key=errors.__getitem__)
    ratio = ratios(results)[worst]
    chips = len({parse_target(run.target)[0].name for run in there.values()})
    few = f" The runs are of {chips} chips; the page is to have 6." if chips < 6 else ""
    compiled = [errors[name] for name, run in there.items() if compiles(run)]
    if compiled:
        few += (
            f" Of the {len(compiled)} whose source compiles its step, as the kit does, the median error is "
            f"{statistics.median(compiled):.0%} and the worst {max(compiled):.0%}."
        )
    few += f" That is fewer than the {GOAL} runs that this page is to have." if len(errors) < GOAL else ""
    return (
        f"Of {len(errors)} published training steps, the predicted time has a median error of "
        f"{statistics.median(errors.values()):.0%} (aim: 15%); the worst is {errors[worst]:.0%} (aim: 35%), of "
        f"{worst}, at {ratio:.2f} times the published time.{few}"
    )


def _aims(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    """What was to be reached, what was, and by how much it is missed."""
    times = [error(ratio) for ratio in ratios(results).values()]
    memory = [error(results[name]["bytes"] / 1e9 / run.gigabytes) for name, run in there.items() if run.gigabytes]
    faster = [error(predicted / published) for _, published, predicted in _pairs(results)]
    aims = [
        ("time, median error", statistics.median(times), 0.15),
        ("time, worst error", max(times), 0.35),
        ("memory, worst error", max(memory, default=0.0), 0.10),
        ("speed-up, worst error", max(faster, default=0.0), 0.15),
        ("speed-up, median error", statistics.median(faster or [0.0]), 0.15),
    ]
    rows = [
        (name, f"{aim:.0%}", f"{reached:.0%}", f"missed by {reached - aim:.0%}" if reached > aim else "reached")
        for name, reached, aim in aims
    ]
    return table(("of the runs below", "aim", "error", ""), rows)


def _row(name: str, run: Run, result: dict[str, Any]) -> tuple[str, ...]:
    parts = (result[part] for part in ("products", "other", "uncovered", "bound"))
    how = [
        ", ".join(result["blocks"]),
        f"for {run.target}" if run.chips > 1 and str(run.chips) not in run.target else "",
        run.note,
    ]
    return (
        name,
        f"{run.chips} {parse_target(run.target)[0].name}",
        _time(run.seconds),
        _time(result["seconds"]),
        f"{result['seconds'] / run.seconds:.2f}",
        *map(_time, parts),
        "; ".join(filter(None, how)) or "whole",
    )


def _memory(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    rows = [
        (
            name,
            f"{run.gigabytes:.2f}",
            f"{results[name]['bytes'] / 1e9:.2f}",
            f"{results[name]['bytes'] / 1e9 / run.gigabytes:.2f}",
        )
        for name, run in there.items()
        if run.gigabytes
    ]
    if not rows:
        return "No run that was compiled has a published peak of memory."
    return table(("run", "published, GB a device", "predicted", "ratio"), rows)


def _pairs(results: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Of each pair of runs that was compiled, the faster, and its published and predicted speed-up."""
    return [
        (
            fast,
            RUNS[slow].seconds / RUNS[fast].seconds * _growth(slow, fast),
            results[slow]["seconds"] / results[fast]["seconds"] * _growth(slow, fast),
        )
        for slow, fast in FASTER
        if slow in results and fast in results
    ]


def _growth(slow: str, fast: str) -> float:
    """How many times the rows of the slower run the faster has in a step."""
    return RUNS[fast].rows / RUNS[slow].rows


def _faster(results: dict[str, dict[str, Any]]) -> str:
    slower = {fast: slow for slow, fast in FASTER}
    rows = []
    for fast, published, predicted in _pairs(results):
        slow = slower[fast]
        growth = _growth(slow, fast)  # the time saved is that of a step of the faster run
        saved = [results[slow][part] * growth - results[fast][part] for part in ("products", "other")]
        row = (fast, f"{published:.2f}", f"{predicted:.2f}", f"{predicted / published:.2f}")
        rows.append((*row, _time(RUNS[slow].seconds * growth - RUNS[fast].seconds), *map(_time, saved)))
    if not rows:
        return "No pair of runs was compiled."
    names = ("run", "published", "predicted", "ratio", "time saved, published", "predicted, products", "other")
    return table(names, rows)


def _cycles(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    """Both ways to time a TPU's kernels, or nothing where no TPU's run was compiled."""
    rows = [
        (
            name,
            _time(run.seconds),
            _time(results[name]["seconds"]),
            f"{results[name]['seconds'] / run.seconds:.2f}",
            _time(results[name]["cycles"]),
            f"{results[name]['cycles'] / run.seconds:.2f}",
        )
        for name, run in there.items()
        if results[name].get("cycles")
    ]
    if not rows:
        return ""
    return CYCLES + table(("run", "published", "by rates", "ratio", "by cycles", "ratio"), rows)


def _programs(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    """The ratios by the program that ran at the source."""
    groups: dict[str, list[float]] = {}
    for name, run in there.items():
        groups.setdefault(_program(run), []).append(results[name]["seconds"] / run.seconds)
    return _groups("program of the source", groups)


def _program(run: Run) -> str:
    return next((title for part, title in PROGRAMS.items() if part in run.source), "other")


def _by_chip(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    """The ratios by the chip."""
    groups: dict[str, list[float]] = {}
    for name, run in there.items():
        groups.setdefault(parse_target(run.target)[0].title, []).append(results[name]["seconds"] / run.seconds)
    return _groups("chip", groups)


def _groups(title: str, groups: dict[str, list[float]]) -> str:
    rows = [
        (name, str(len(of_runs)), f"{statistics.median(of_runs):.2f}", f"{min(of_runs):.2f} to {max(of_runs):.2f}")
        for name, of_runs in groups.items()
    ]
    return table((title, "runs", "median ratio", "ratios"), rows)


def _precisions(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    groups: dict[str, list[float]] = {}
    for name, run in there.items():
        fp8 = "FP8" if "fp8" in run.step else ""
        precision = fp8 or {"float32": "float32 (TF32)", "mixed_float16": "float16"}.get(run.policy, "bfloat16")
        groups.setdefault(precision, []).append(results[name]["seconds"] / run.seconds)
    return _groups("precision", groups)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def depths() -> str:
    """The line through few blocks and more against the step with many more."""
    path = Path(__file__).with_name("depths.json")
    if not path.exists():
        return "Not compiled yet: `python benchmarks/depths.py`."
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
        f"{many} blocks, beside the step that was compiled with {many}. `python benchmarks/depths.py`.\n\n"
        + table(("", f"on the line, {many} blocks", f"compiled, {many} blocks", "the line is off by"), rows)
    )


def cpu() -> str:
    """Predictions for this machine's CPU against `keras_mp.bench.benchmark`."""
    path = Path(__file__).with_name("cpu_predictions.json")
    if not path.exists():
        return "Not measured yet: `python benchmarks/cpu_predictions.py`."
    kept = json.loads(path.read_text())
    rows = []
    for name, predicted in kept["predicted"].items():
        took, measured, ratio = kept["measured"].get(name), "-", "-"
        if took:
            low, median, high = (f"{took[which] * 1e3:,.0f}" for which in ("low", "median", "high"))
            measured, ratio = f"{median} ms ({low} to {high})", f"{predicted['seconds'] / took['median']:.2f}"
        predicted_time, *parts = (f"{predicted[part] * 1e3:,.0f} ms" for part in ("seconds", "products", "other"))
        rows.append((name, measured, predicted_time, ratio, *parts))
    return (
        "The three models for a CPU of `benchmarks/peer_workloads.py`, in float32 on JAX, 2 cores. The constants are "
        "fitted to products, convolutions and sums that the command measures on the same CPU, and not to the models. "
        "Measured with `keras_mp.bench.benchmark`: the median of the rounds, with its quartiles. "
        "`python benchmarks/cpu_predictions.py`.\n\n"
        + table(("model", "measured", "predicted", "ratio", "products", "other"), rows)
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ("---", *["---"] * (len(names) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
