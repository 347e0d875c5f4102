"""The page of predictions: published steps beside what `inspect` predicts of them, made from predictions.json."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.predictions import RUNS, Run, error, ratios
from keras_mp.precision.chips import parse_target

GOAL = 15
# Pairs of runs whose ratio is the speed-up of a precision.
FASTER = (
    ("ResNet-50 v1.5, TF32", "ResNet-50 v1.5, AMP"),
    ("ResNet-50 v1.5, PyTorch, TF32", "ResNet-50 v1.5, PyTorch, AMP"),
    ("BERT-large, SQuAD, TF32", "BERT-large, SQuAD, FP16"),
    ("Llama 3 8B, bfloat16, 8 H100", "Llama 3 8B, FP8, 8 H100"),
    ("Llama 3 8B, bfloat16, 8 B200", "Llama 3 8B, FP8, 8 B200"),
)

TEXT = """# Predicted and published training steps

{summary}

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

## Where the error is

{precisions}

On A100, TF32 products are predicted with the share of the peak that products of 16-bit operands reach, because no table
of TF32 products is among the sources; convolutions are predicted as products of the same size. A run that is predicted
too fast in TF32 and not in 16 bits suggests that TF32 convolutions and products reach less. A table of each is the next
step. Not modelled: the time between kernels, caches, collectives slower than their links, clocks that fall under load,
and, on TPUs, arrays that stay in the fast memory of the core (the compiler's own cycles are not used).

## Which runs are taken

A run is taken if all of this holds. The rule was written before the first run was compiled, and no run that was
compiled is left out.

1. It is a training step whose model, batch, lengths, precision, optimizer and division over devices are in the
   source, or in the program that the source names.
2. `inspect` compiles for its chip.
3. Nothing is kept in the host's memory, and the devices are one host or one slice.
4. Its data do not limit it: synthetic, or loaded beside the step.
5. Kernels that were written by hand (flash attention) and selective recomputation do not exclude a run; the last
   column names them.
6. Where a slice is too large to be compiled here, the same work a chip is compiled for a smaller one.

{missing}

## How the time is predicted

- A matrix product or convolution takes `start + sqrt(computing^2 + moving^2)`: its operations at a share of the peak,
  and its bytes at a share of the memory's bandwidth.
- Another kernel takes `start + moving`.
- Kernels run one after another in the compiled order. A collective that starts and ends apart runs beside the kernels
  between; what remains of it is uncovered. Links run at their peak rate.

The shares and the two starts are constants of a chip's generation, in `keras_mp/xla/efficiency.py`.
`benchmarks/fit_efficiency.py` fits them to published measurements of products and of memory bandwidth
(`benchmarks/efficiency_tables.json`, with sources): Google's table for TPU7x, DeepBench for V100 and T4, the maximum
achievable rates of Bekman's *Machine Learning Engineering*, the tables of Transformer Engine, and measurements of
bandwidth. No training step is among them (`tests/xla/test_efficiency.py::test_constants_are_fitted_to_the_tables`). A
generation without a table of small products (A100, H100, B200) takes those of the V100; TPUs before v6e take those of
v6e.

## Sources

{sources}

`python benchmarks/predictions.py --markdown docs/predictions.md`, compiled {dates} with jax {jax}. One run is one
entry of `benchmarks/predictions.json`.
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page, from the results that are there."""
    there = {name: run for name, run in RUNS.items() if name in results}
    missing = [name for name in RUNS if name not in results]
    listed = f"Not compiled yet: {', '.join(missing)}." if missing else "All runs of the list were compiled."
    return TEXT.format(
        summary=_summary(results, there),
        runs=_table(
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
    few += f" That is fewer than the {GOAL} runs that this page is to have." if len(errors) < GOAL else ""
    return (
        f"Of {len(errors)} published training steps, the predicted time has a median error of "
        f"{statistics.median(errors.values()):.0%} (aim: 15%); the worst is {errors[worst]:.0%} (aim: 35%), of "
        f"{worst}, at {ratio:.2f} times the published time.{few}"
    )


def _row(name: str, run: Run, result: dict[str, Any]) -> tuple[str, ...]:
    parts = (result[part] for part in ("products", "other", "uncovered", "bound"))
    how = [
        ", ".join(result["blocks"]),
        f"for {run.target}" if run.chips > 1 and str(run.chips) not in run.target else "",
        run.note,
    ]
    return (
        name,
        f"{run.chips} {run.target.split('x')[0] if run.target[0] in 'hb' else run.target}",
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
    return _table(("run", "published, GB a device", "predicted", "ratio"), rows)


def _faster(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for slow, fast in FASTER:
        if slow in results and fast in results:
            published = RUNS[slow].seconds / RUNS[fast].seconds
            predicted = results[slow]["seconds"] / results[fast]["seconds"]
            rows.append((fast, f"{published:.2f}", f"{predicted:.2f}", f"{predicted / published:.2f}"))
    if not rows:
        return "No pair of runs was compiled."
    return _table(("run", "published", "predicted", "ratio"), rows)


def _precisions(results: dict[str, dict[str, Any]], there: dict[str, Run]) -> str:
    groups: dict[str, list[float]] = {}
    for name, run in there.items():
        fp8 = "FP8" if "fp8" in run.step else ""
        precision = fp8 or {"float32": "float32 (TF32 on A100)", "mixed_float16": "float16"}.get(run.policy, "bfloat16")
        groups.setdefault(precision, []).append(results[name]["seconds"] / run.seconds)
    rows = [
        (precision, str(len(of_runs)), f"{statistics.median(of_runs):.2f}", f"{min(of_runs):.2f} to {max(of_runs):.2f}")
        for precision, of_runs in groups.items()
    ]
    return _table(("precision", "runs", "median ratio", "ratios"), rows)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [names, ("---", *["---"] * (len(names) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
