"""Which chips hold the training of a model, and what makes it fit: `advise`."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_mp.lowering import Source, plan_of
from keras_mp.planner.chips.place import Place, find_place
from keras_mp.planner.fit.advice_report import COMPILED, FROM_SHAPES, AdviceReport, ChipAdvice
from keras_mp.planner.fit.figures import state_of
from keras_mp.planner.fit.measures import Measures, lines
from keras_mp.planner.fit.schedule import NEARLY_FULL, UNCONSTRAINED, Asked, Schedule
from keras_mp.planner.fit.step import WITHOUT_CODE, Step
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.time.step_time import score
from keras_mp.reporting.progress import progress
from keras_mp.reporting.text import byte_size, listed
from keras_mp.system.host import available_bytes
from keras_mp.system.packages import installed

_MEMORY_OF_A_COMPILER = 3 * 2**30
_MOST_COMPILERS = 8
# Published steps that are said to fit, and how many of these ran out of memory; the same of those that XLA compiled;
# those that are said not to fit, and how many ran: docs/tables/predictions.md.
OUTCOMES = ((122, 18), (52, 6), (10, 4))


def advise(
    build: keras.Model | Callable[[], keras.Model],
    batch: Any,
    target: str | Sequence[str],
    *,
    compare: Sequence[str] = (),
    flags: dict[str, Any] | None = None,
    strategy: str | None = None,
    workers: int | None = None,
    verbose: bool = True,
    text: str = "",
) -> AdviceReport:
    """Finds the chips that hold a model's training.

    For each it names the cheapest measures that make the training fit.

    It asks of several chips and changes what `inspect` asks of one, and a row has what `inspect` returns:
    `advise(build, batch, ["h100", "v5e"])["v5e"].report`. The step is compiled for each chip, which need not be
    attached; nothing runs. The precision is that in which training pays on the chip: bfloat16, or float16 where the
    chip has no bfloat16. Measures are tried in order of what they change:

    1. What computes the same: frozen weights in 16 bits, then lean layers.
    2. What costs time: micro-batches, remat by block, then both; of several chips, copies of the weights on each
       ("data") with any of these come before "fully_sharded".
    3. What trains another way, with any of the above: the optimizer's states in 8 bits; also weights in bfloat16, where
       `build` is a function and the chip has bfloat16; gradients released; on JAX, the states in the host's memory.

    A set fits a GPU where it leaves a tenth of the memory to the runtime. Where none does, the set that needs the least
    is named if the memory holds it, with a note. What is larger than the memory by its shapes alone is not compiled,
    and chips of one compute capability share a compile where the step is well below the memory of both. A model of more
    than 24 equal blocks is extrapolated from the same with 4 and with 8, where it can be built so: by `build(blocks)`,
    or by `num_layers` in the config of a backbone or task of KerasHub. All results are kept for later calls.

    Args:
        build: a function that builds and compiles a model; on JAX its variables get shapes and no values, so that a
            model larger than this machine can be asked about. It is called without arguments; if it has a parameter
            `blocks`, whose default is how many blocks the model has, also with fewer. Or a built and compiled model.
        batch: (x, y) or (x, y, sample_weight) of one update, on all devices together: arrays, or anything with a shape
            and a dtype, such as `keras.KerasTensor`.
        target: chips, such as "h100", "RTX 4090" or "v5e", or several of one: "rtx4090x4", "v5e-8". Several need JAX.
        compare: other precisions to compile the step that was found in, as for `inspect`; they are in the `compared` of
            a row's report.
        flags: further options of XLA, as for `inspect`.
        strategy: the way in which several chips share the step, where only one way is wanted: "data", "fully_sharded"
            or "tensor".
        workers: the number of compilers that run at once; by default as many as this machine has cores and memory for.
        verbose: whether standard error says how far it is: in a bar on a terminal, elsewhere in a line when a chip is
            asked about, when a compiler starts for it, and when there is its answer.
        text: the text right of `model =` in the lines that the report prints; by default the name of `build`.

    Returns:
        The report, a row for each chip. A chip whose compiler is not installed gets a row from shapes alone.

    Raises:
        TypeError: If build is neither a model nor a function that returns one, or its `blocks` has no default.
        ValueError: If a chip is not known, the message then has the nearest names; if the devices of a target do not
            divide the batch; if a precision or strategy is not known, or no target names several chips for it; or if
            the model is not built, or not compiled with an optimizer and a loss.

    Examples:
        >>> import keras, keras_mp
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> batch = keras.KerasTensor((16, 8), "float32"), keras.KerasTensor((16, 4), "float32")
        >>> keras_mp.advise(build, batch, "t4", verbose=False)["t4"].fits
        True
    """
    return answer(build, batch, target, Options(compare, flags, strategy, workers, verbose, text))


@dataclass(frozen=True)
class Options:
    """How `answer` searches.

    Attributes:
        compare, flags, strategy, workers, verbose, text: the arguments of `advise`.
        first: measures, by the name of the target: sets that come before the first that has them are not asked. A
            target that is not named is asked from the plain step on.
        all_blocks: whether a deep model is compiled with all blocks at once, instead of few.
        code: whether a step that nearly fills a TPU is compiled to the end, and its program counted.
    """

    compare: Sequence[str] = ()
    flags: dict[str, Any] | None = None
    strategy: str | None = None
    workers: int | None = None
    verbose: bool = True
    text: str = ""
    first: Mapping[str, Measures] = field(default_factory=dict)
    all_blocks: bool = False
    code: bool = True


def answer(
    build: keras.Model | Callable[[], keras.Model], batch: Any, target: str | Sequence[str], options: Options
) -> AdviceReport:
    """Does what `advise` does.

    Args:
        build, batch, target: the arguments of `advise`.
        options: the other arguments of `advise`, and what only the fits table asks for.
    """
    started = time.monotonic()
    places = find_places(target, options.strategy)
    source = Source(build, options.text, "build")
    precisions = source.check_precisions(options.compare)
    how = (options.flags, options.strategy or "", options.all_blocks, options.code)
    with progress_of(len(places), options.verbose) as tell:
        tell(source.text or "the model", "tracing its step", False)
        step = Step(source, batch, places[0].traced, *how)
        for place in places:
            if place.strategy != "tensor" and step.rows % place.devices:
                raise ValueError(
                    f"the batch has {step.rows} rows, which the {place.devices} devices of {place.name!r} do not "
                    f"divide: give a multiple of {place.devices}"
                )
        obstacles = {place: place.obstacle for place in places}
        for place, obstacle in obstacles.items():
            if obstacle:
                tell(place.title, f"not compiled. {obstacle}", True)
        schedule = Schedule(step, precisions, tell, options.first)
        compiled = [place for place in places if not obstacles[place]]
        asked = schedule.run(compiled, options.workers or _compilers())
    rows: dict[Place, ChipAdvice] = {one.place: compiled_row(one, step, source) for one in asked}
    rows |= {place: shapes_row(place, step, source, reason) for place, reason in obstacles.items() if reason}
    return AdviceReport(
        model=step.plain.model,
        backend=keras.backend.backend(),
        parameters=step.outline.parameters,
        batch=step.plain.batch,
        rows=tuple(rows[place] for place in places),
        compiles=schedule.compiled,
        kept=schedule.from_files,
        seconds=time.monotonic() - started,
        notes=tuple(_notes(rows)),
        versions=installed(("keras", "jax", "libtpu", "jax-cuda13-plugin")),
    )


def find_places(target: str | Sequence[str], strategy: str | None = None) -> list[Place]:
    """Reads the chips that are asked about, each once.

    Raises:
        ValueError: If one is not known or none is named, or a strategy is not known or none of the targets names
            several chips for it.
    """
    names = [target] if isinstance(target, str) else list(target)
    if not names:
        raise ValueError(
            "target names no chip: give some, such as ['rtx4090', 'v5e'] (`keras-mp doctor --chips` lists them)"
        )
    if strategy is not None:
        plan_of(strategy, 1)
    places = list(dict.fromkeys(find_place(name, strategy or "") for name in names))
    if strategy is not None and all(place.devices == 1 for place in places):
        raise ValueError(f"strategy={strategy!r} divides a step over several chips: name them, as {names[0]}x4")
    return places


def compiled_row(one: Asked, step: Step, source: Source) -> ChipAdvice:
    """The row of a chip that was searched."""
    measures = one.nearest
    if measures is None:
        return shapes_row(one.place, step, source, one.failure)
    place, origin = one.place, one.origins[measures]
    report = replace(one.tried[measures], compared=one.compared)
    fits = True if one.best is not None else None if one.failure else False
    notes = [
        *_room(report, place, fits),
        *(note for note in report.notes if note == WITHOUT_CODE),
        *(_notes_on(measures, step, place) if fits else ()),
    ]
    notes += [f"In {precision} nothing is compiled: {failure}" for precision, failure in one.failures.items()]
    return ChipAdvice(
        target=place.name,
        title=place.title,
        devices=place.devices,
        fits=fits,
        measures=measures,
        memory=report.memory,
        report=report,
        how=COMPILED if origin.chip is place.chip else f"a compile for {origin.title}, of the same architecture",
        reason=one.failure if fits is None else "" if fits else _reason(report),
        code=lines(measures, source, place.devices, step.rows) if fits else (),
        compiles=len(one.tried),
        shared=sum(origin.chip is not place.chip for origin in one.origins.values()),
        notes=tuple(notes),
    )


def shapes_row(place: Place, step: Step, source: Source, reason: str) -> ChipAdvice:
    """The row of a chip for which nothing was compiled.

    Args:
        place, step, source: the chip, the model and where it comes from.
        reason: the reason, where it is not that the state alone is larger than the memory.
    """
    measures, least = _least(place, step)
    return ChipAdvice(
        target=place.name,
        title=place.title,
        devices=place.devices,
        fits=None if least.fits else False,
        measures=None,
        memory=least,
        report=None,
        how=FROM_SHAPES,
        reason=reason if least.fits else _larger_state(least, place, measures),
    )


def _least(place: Place, step: Step) -> tuple[Measures, Memory]:
    """The first state that fits, of all strategies and with more and more of what makes it smaller; or the smallest."""
    least: list[tuple[Measures, Memory]] = []
    for ladder in step.ladders(place):
        for measures in (stage[0] for stage in ladder if stage[0].micro_batches == 1):
            least.append((measures, step.state(place, measures)))
            if least[-1][1].fits:
                return least[-1]
    return min(least, key=lambda state: state[1].peak)


def _larger_state(least: Memory, place: Place, measures: Measures) -> str:
    state = state_of(least)
    names = [measure.name for measure in measures.state.taken]
    smaller = f", with {listed(names, 80, 'measures')}" if names else ""
    text = f"Weights, optimizer and batch alone take {byte_size(state)} a device{smaller}."
    number = math.ceil(state * place.devices / place.capacity)
    return f"{text} Fully sharded they are smaller than the memory of {number} such devices or more."


def _reason(report: CompileReport) -> str:
    """What takes the memory, the most first."""
    memory = report.memory
    kinds = {
        "weights": memory.parameters,
        "the optimizer": memory.optimizer,
        "activations kept for the backward pass": memory.activations,
        "gradients and other temporary arrays": max(0, memory.peak - state_of(memory) - memory.activations),
    }
    ordered = sorted((kind for kind in kinds.items() if kind[1]), key=lambda kind: -kind[1])
    text = ", ".join(f"{name} {byte_size(size)}" for name, size in ordered)
    text = f"Memory goes to {text}."
    if memory.largest:
        first = memory.largest[0]
        array = f"{first.dtype}{list(first.shape)} of {first.layer}"
        text += f" The largest temporary array: {array}, {byte_size(first.bytes)}."
    return text


def _room(report: CompileReport, place: Place, fits: bool | None) -> list[str]:
    """How far a figure is to be trusted, by how it was found and by what it leaves of the memory."""
    share = report.memory.peak / place.capacity if place.platform == "cuda" else 0.0
    notes = [f"The compiler refuses the step: {report.refused}."] if report.refused else []
    if report.extrapolated:
        notes.append(
            f"Extrapolated from {report.extrapolated}, which were compiled: weights and optimizer are exact, "
            "temporary memory is on the line through both."
        )
        if share > UNCONSTRAINED:
            notes.append(
                "The compiler saves memory where a step comes near to what a GPU has, and did not with few blocks: "
                "with all of them the step may need less, and fewer measures may be enough."
            )
    elif fits and share > NEARLY_FULL:
        notes.append(f"It needs {share:.0%} of the memory, of which a GPU's runtime takes a part: it may not fit.")
    return notes


def _notes_on(measures: Measures, step: Step, place: Place) -> list[str]:
    notes = []
    sees_batch = step.outline.sees_batch
    if measures.micro_batches > 1 and sees_batch:
        notes.append(
            f"BatchNormalization ({sees_batch[0]} and others) computes its statistics over a micro-batch of "
            f"{step.rows // (measures.micro_batches * place.devices)} rows, so the training differs."
        )
    if measures.micro_batches > 1:
        notes.append(f"The bound is that of one micro-batch, the time that of all {measures.micro_batches}.")
        notes.append(
            "Micro-batches make the same update if the loss divides by the number of rows or of targets. If masks or "
            "sample weights change that number, the update differs: it becomes the mean of the micro-batches' means."
        )
    notes += [measure.note for measure in measures.taken if measure.note]
    if place.devices == 1 and place.chip.devices > 1:
        notes.append(f"On one of the {place.chip.devices} devices that the runtime makes of one {place.chip.title}.")
    return notes


def _notes(rows: Mapping[Place, ChipAdvice]) -> list[str]:
    (fit, out), (by_xla, out_by_xla), (over, ran) = OUTCOMES
    notes = [
        "Memory is the compiler's; nothing was run. A bound is the time at the chip's peak rates, which no kernel "
        f"reaches. Of {fit} published steps that fit by the compiler's figure, {out} ran out of memory, {out_by_xla} "
        f"of the {by_xla} that XLA had compiled there; of {over} that do not fit, {ran} ran."
    ]
    titles: dict[str, list[str]] = {}
    for place, row in rows.items():
        if row.report is not None and row.report.time is not None:
            titles.setdefault(score(place.chip, row.report.time), []).append(place.title)
    notes += [f"Time on {', '.join(names)}: {sentence}" for sentence, names in titles.items()]
    return notes


def _compilers() -> int:
    """As many compilers as there are cores, and gigabytes for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = available_bytes()
    return max(1, min(_MOST_COMPILERS, cores, _MOST_COMPILERS if room is None else room // _MEMORY_OF_A_COMPILER))


@contextmanager
def progress_of(chips: int, shown: bool) -> Iterator[Callable[[str, str, bool], None]]:
    """Shows a bar on terminals, elsewhere a line a step.

    Yields:
        A function that takes the title of a chip, what is done for it, and whether that is its answer.
    """
    if not shown:
        yield lambda title, words, done: None
        return
    if not sys.stderr.isatty():
        started = time.monotonic()
        yield lambda title, words, done: print(
            f"{time.monotonic() - started:.0f} s  {title}: {words}", file=sys.stderr, flush=True
        )
        return
    with progress("chips", chips) as bar:
        yield lambda title, words, done: bar(f"{title}: {words}", int(done))
