"""How far to trust a prediction: intervals by class, how often "fits" failed, constants by source, beside Hespas."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.planner import intervals
from benchmarks.planner.fit_efficiency import TABLES, TAKEN_FROM
from benchmarks.planner.published_fits import FITS
from benchmarks.planner.published_runs import PEER, RUNS, XLA, error, predicted
from keras_mp.planner.fit.schedule import NEARLY_FULL
from keras_mp.planner.time.step_time import EFFICIENCIES, INTERVALS, LINKS, OPERATIONS, Efficiency, generation_of
from keras_mp.precision.chips import CHIPS, parse_target

Results = Mapping[str, dict[str, Any]]
FIT, NEARLY, NOT = "fits", "nearly full", "does not fit"
GROUPS = {True: "compiled by XLA at the source", False: "something else, or nothing, compiled it there"}
RECOMPUTED = "XLA computes arrays again until the step is below its own limit; PyTorch keeps them"
SCORES = "PyTorch's attention of that day keeps scores, probabilities and the mask of dropout; XLA keeps one of them"
SHARDED = (
    "not known: a GPU holds a quarter of weights, gradients and states, which leaves room; the source says OOM only"
)
BINNED = "the source sorts sequences of up to 512 tokens by length, so that most batches hold less"
# Of each answer that is wrong, the reason, by how the step's name begins.
WHY = {
    "GPT-2 124M, 8 x 1024": SCORES,
    "LitGPT, Llama 2 7B, LoRA": "LitGPT keeps more for the backward pass: 1 and 2 sequences are below their peak, too",
    "LitGPT, Llama 2 7B in full": SHARDED,
    "LitGPT, Llama 3 8B in full": SHARDED,
    "timm, vit": SCORES,
    "timm": RECOMPUTED,
    "modded": "the logits, 13 GB in float32, are there several times in a loss that is not compiled with the model",
    "BERT-large, SQuAD": BINNED,
    "BERT-large, pretraining": BINNED,
    "Llama 2 7B, MaxText, 8 H100, 32 rows": "extrapolated from few blocks, far from the limit where XLA saves memory",
    "BERT-large": "not known; TensorFlow compiled clusters of the step with XLA there, and not the whole",
}


class Answer(NamedTuple):
    """What the kit says of a step that is known to have run or not.

    Args:
        name: the name of the step.
        ran: whether it ran at the source.
        said: "fits", "nearly full" or "does not fit".
        xla: whether XLA compiled it at the source.
        needs, has: bytes of a device.
        chip: the chip at the source.
    """

    name: str
    ran: bool
    said: str
    xla: bool
    needs: int
    has: int
    chip: str


def answers(compiled: Results) -> list[Answer]:
    """What the kit says of each step that is known to have run on as many chips, or to have run out of memory."""
    found = []
    for name, run in RUNS.items():
        chip, chips = parse_target(compiled[name].get("target", run.target)) if name in compiled else (None, 0)
        if chip is not None and chips == run.chips:
            needs, has = compiled[name]["bytes"], chip.device_bytes
            found.append(Answer(name, True, _said(needs, has, chip.vendor), run.group == XLA, needs, has, chip.title))
    for name, fit in FITS.items():
        if name in compiled:
            chip, _ = parse_target(fit.target)
            needs, has = compiled[name]["bytes"], int(fit.gibibytes * 2**30) or chip.device_bytes
            said = NOT if "refused" in compiled[name] else _said(needs, has, chip.vendor)
            xla = "BERT" in name or "XLA" in fit.note
            found.append(Answer(name, fit.ran, said, xla, needs, has, fit.chip or chip.title))
    return found


def outcomes(results: Results) -> tuple[tuple[int, int], ...]:
    """What a note of `advise` says: steps that are said to fit, or not, and how many of these ended otherwise."""
    found = answers({name: result for name, result in results.items() if "failed" not in result})
    fits, over = ([answer for answer in found if answer.said == said] for said in (FIT, NOT))
    by_xla = [answer for answer in fits if answer.xla]
    return (len(fits), _count(fits, False)), (len(by_xla), _count(by_xla, False)), (len(over), _count(over, True))


def _said(needs: int, has: int, vendor: str) -> str:
    if needs > has:
        return NOT
    return NEARLY if vendor == "nvidia" and needs > NEARLY_FULL * has else FIT


def trust(results: Results) -> str:
    """The sections, in Markdown."""
    compiled = {name: result for name, result in results.items() if "failed" not in result}
    return "\n\n".join((_intervals(compiled), _fits(compiled), _beside_hespas(compiled), _constants()))


def _intervals(compiled: Results) -> str:
    rows = intervals.scored(compiled)
    now, before = intervals.left_out(rows), intervals.ranges_before(rows)
    by_class: dict[str, list[intervals.Scored]] = defaultdict(list)
    for row in rows:
        by_class[row.classes[0]].append(row)
    lines = []
    for name, of_class in by_class.items():
        taken = next(other for other in of_class[0].classes if other in INTERVALS)
        of = INTERVALS[taken]
        held, _, _ = intervals.coverage(of_class, now)
        held_before, known, width = intervals.coverage(of_class, before)
        lines.append(
            (
                name,
                f"{len(of_class)} of {len({row.source for row in of_class})}",
                "its own" if taken == name else taken,
                f"{of.least:.2f} to {of.most:.2f}",
                f"{of.most / of.least:.1f}",
                f"{held} of {len(of_class)}",
                f"{held_before} of {known}" if known else "no other source",
                "-" if math.isnan(width) else f"{width:.1f}",
            )
        )
    held, known, width = intervals.coverage(rows, now)
    held_before, known_before, width_before = intervals.coverage(rows, before)
    missed = [row for row in rows if not now[row.name][0] <= row.figure <= now[row.name][1]]
    return (
        "## The range of a time\n\nA report gives a range that nine of ten published times of the step's class are "
        "in, by the conformal rule (`benchmarks/planner/intervals.py`). A class is a generation of chips and what "
        f"takes most of the time; one with fewer than {intervals.LEAST_RUNS} runs or {intervals.LEAST_SOURCES} sources "
        f"takes that of a wider one. Made anew without the repository that published a run, it holds **{held} of "
        f"{known} runs, {held / known:.0%}**, most by least {width:.1f} at the median. The range from the least to the "
        f"most of a chip's runs, which reports gave before, holds {held_before} of the {known_before} that have one "
        f"so, {held_before / known_before:.0%}, at {width_before:.1f}. Not held: "
        f"{'; '.join(f'{row.name} ({math.exp(row.figure):.2f})' for row in missed)}.\n\n"
        + _table(
            (
                "class",
                "runs of sources",
                "range of",
                "times the prediction",
                "most by least",
                "held",
                "before: held",
                "most by least",
            ),
            lines,
        )
    )


def _fits(compiled: Results) -> str:
    found = answers(compiled)
    lines = []
    for ran, outcome in ((True, "ran"), (False, "ran out of memory")):
        for xla, group in GROUPS.items():
            counts = Counter(answer.said for answer in found if (answer.ran, answer.xla) == (ran, xla))
            lines.append(
                (f"{outcome}; {group}", *(str(counts[said]) for said in (FIT, NEARLY, NOT)), str(counts.total()))
            )
    wrong = [answer for answer in found if answer.said == (NOT if answer.ran else FIT)]
    waiting = [name for name in FITS if name not in compiled]
    out = [answer for answer in found if not answer.ran]
    rows = [
        (
            answer.name,
            answer.chip,
            "ran" if answer.ran else "out of memory",
            f"{answer.needs / 2**30:.1f} of {answer.has / 2**30:.1f} GiB",
            _why(answer),
            f"[source]({FITS[answer.name].source})" if answer.name in FITS else "below",
        )
        for answer in wrong
    ]
    fits, over = ([answer for answer in found if answer.said == said] for said in (FIT, NOT))
    said = (
        f"Of {len(found)} steps whose outcome is published, {len(out)} ran out of memory, on "
        f"{len({answer.chip for answer in out})} chips (`benchmarks/planner/published_fits.py`). "
        f"Where the kit says that a step fits, {_count(fits, False)} of {len(fits)} did not; of those that XLA "
        f"compiled there, {_count([answer for answer in fits if answer.xla], False)} of "
        f"{sum(answer.xla for answer in fits)}. "
        f'Where it says that a step does not fit, {_count(over, True)} of {len(over)} ran. "Nearly full" is more than '
        f"{NEARLY_FULL:.0%} of a GPU, where a report says that a step may not fit: most are the largest batch that ran."
    )
    said += f" Not compiled yet, for want of time: {'; '.join(waiting)}." if waiting else ""
    return (
        f'## How often "fits" fails\n\n{said}\n\n'
        + _table(("at the source", FIT, NEARLY, NOT, "all"), lines)
        + "\n\nEvery wrong one:\n\n"
        + _table(("step", "chip", "at the source", "the kit", "why", ""), rows)
    )


def _count(found: Sequence[Answer], ran: bool) -> int:
    return sum(answer.ran == ran for answer in found)


def _why(answer: Answer) -> str:
    return next((why for start, why in WHY.items() if answer.name.startswith(start)), "not known")


def _beside_hespas(compiled: Results) -> str:
    rows = []
    for name, run in PEER.items():
        if name in compiled:
            ours = predicted(compiled[name])
            assert run.seconds is not None
            rows.append((name, f"{run.seconds * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms", f"{ours / run.seconds:.2f}"))
    errors = [error(float(row[3])) for row in rows]
    return (
        "## Beside Hespas\n\nHespas (arXiv:2604.12090) predicts times of StableHLO that JAX exports. Its authors "
        "publish measured times (github.com/imec-int/hespas, experiments/ispass_2026/refs), rounded to a hundredth of "
        "a second, and of one step what it predicts: a Llama of 100M on 4 A100 40 GB takes 60.6 ms by its analytical "
        "estimator, 111.7 ms by profiling each part on the GPU, and 73 to 87 ms measured (90 ms in the table). The "
        "programs of the other sizes are in a repository that could not be reached, nor could the tables of the paper; "
        f"a TPU v3 has no compiler that can be installed. Median error of these {len(rows)}: "
        f"{statistics.median(errors):.0%}.\n\n"
        + _table(("run", "measured by Hespas's authors", "predicted here", "ratio"), rows)
    )


def _constants() -> str:
    tables = json.loads(TABLES.read_text())
    kinds = ("products", "batched products", "sums of products", "convolutions", "transfers")
    rows = []
    for generation in EFFICIENCIES:
        mine: Counter[str] = Counter()
        for kind in kinds:
            for row in tables[kind]:
                if generation_of(CHIPS[row[0]]) == generation:
                    mine[f"{row[-1]} ({row[0]})"] += 1
        values = "; ".join(_values(EFFICIENCIES[generation]))
        taken = f"; else of {TAKEN_FROM[generation]}" if TAKEN_FROM[generation] else ""
        runs = ", ".join(f"{count} of {source}" for source, count in mine.items())
        rows.append((f"rates, generation {generation}", values, f"{runs}{taken}", "none"))
    links, axlearn = LINKS["nvidia"], f"{len(tables['attention'])} of axlearn (v5p); adders by the scaling book"
    collectives = f"{len(tables['collectives'])} of XLA's collectives (h100)"
    rows.append(("collectives on NVIDIA's links", f"share {links.share}, start {links.start}", collectives, "none"))
    rows += [
        ("side of a TPU's matrix unit", "128; v6e, v7x 256", "JAX's tpu_info.py", "none"),
        ("cuDNN's attention", "0.64 of products", "FlashAttention-3, figures 5 and 6 (h100)", "none"),
        ("a TPU's vector units in attention", f"{OPERATIONS} operations of a score and product", axlearn, "none"),
        ("arithmetic of other kernels", "cycles by operation", "XLA's hlo_op_profiles_data.h, sm_103", "none"),
        (
            "ranges of a time",
            "intervals.json",
            "the runs below, the run's own source left out when it is scored",
            "all",
        ),
        (
            "no time for grouped convolutions",
            "5% of the bytes",
            "set when the runs below were known",
            "six, which count no more",
        ),
        ("no time for small steps on several hosts", "0.1 s", "set when the runs below were known", "one, as above"),
        ("nearly full", f"{NEARLY_FULL:.0%} of a GPU", "set before the first outcome was looked up", "none"),
    ]
    return (
        "## Constants, and the runs that they come from\n\n"
        + _table(("constant", "value", "measurements", "scored runs among them"), rows)
        + "\n\nThe names of measurements are those of `sources` in `benchmarks/planner/efficiency_tables.json`."
    )


def _values(of: Efficiency) -> Iterator[str]:
    yield ", ".join(f"{bits} bits {share}" for bits, share in of.products.items())
    for name, value in of._asdict().items():
        if name != "products" and value:
            yield f"{name.replace('_', ' ')} {value:g}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
