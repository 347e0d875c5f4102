"""The report of `advise`: a row for each chip, that can be printed and written as JSON or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.console import Group, RenderableType

from keras_mp.planner.fit.measures import OTHER, PLAIN, SAME, TIME, Measures
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.compile_table import answer, on_host
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import byte_size

COMPILED, FROM_SHAPES = "compiled", "shapes alone"


@dataclass(frozen=True)
class ChipAdvice:
    """A chip's row: whether, and how, a training step fits.

    Args:
        target: the chip as it was asked for, such as "rtx4090x4".
        title: the name of the chip as people write it, with the number of chips.
        devices: the number of devices that share the step.
        fits: whether it holds the step under `measures`; None where this is not known.
        measures: the cheapest set that fits; where none does, the one that comes nearest; None where nothing was
            compiled.
        memory: the memory of one device under these measures: the report's; from shapes alone, without temporary
            arrays.
        report: the `CompileReport` for this chip and these measures, of one micro-batch, as `inspect` returns it; None
            where nothing was compiled. Its `compared` has the same in other precisions.
        how: the way in which the figures were found: "compiled", "shapes alone", or another.
        reason: the thing that takes the memory, where the step does not fit; the reason, where this is not known.
        code: the lines that apply the measures, runnable where `build` is.
        compiles: the number of sets of measures that were compiled for this chip.
        shared: the number of these that were compiled for another chip of the report already.
        notes: sentences on what to know of the measures.
    """

    target: str
    title: str
    devices: int
    fits: bool | None
    measures: Measures | None
    memory: Memory
    report: CompileReport | None
    how: str
    reason: str = ""
    code: tuple[str, ...] = ()
    compiles: int = 0
    shared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def time(self) -> float | None:
        """The predicted seconds of an update with all its micro-batches; None where no report gives them."""
        return None if self.report is None else self.time_of(self.report)

    def time_of(self, report: CompileReport) -> float | None:
        """The predicted seconds of an update in the report, or in one that it is compared with."""
        if report.time is None or report.time.unscored or self.measures is None:
            return None
        return report.time.seconds * self.measures.micro_batches

    @property
    def changes(self) -> str:
        """The gravest change among the measures: one of `keras_mp.planner.fit.measures.KINDS`; "" where none fits."""
        return self.measures.kind if self.measures is not None and self.fits else ""

    @property
    def missing(self) -> int:
        """Bytes by which the step is larger than the memory; 0 where it fits, or where this is not known."""
        return max(0, self.memory.peak - self.memory.capacity) if self.fits is False else 0

    @property
    def verdict(self) -> str:
        """In a word: "fits", "does not fit" or "not known"."""
        return {True: "fits", False: "does not fit", None: "not known"}[self.fits]


@dataclass(frozen=True)
class AdviceReport(Report):
    """Which chips hold a model's training, and what helps.

    Args:
        model: the name of the model.
        backend: "tensorflow" or "jax".
        parameters: the number of elements of its weights.
        batch: shape and dtype of each array of the batch, which is that of all devices and micro-batches.
        rows: a `ChipAdvice` for each chip, in the order of the targets.
        compiles: the number of steps that were compiled, or taken from what was kept.
        kept: the number of these that were taken from what an earlier call compiled.
        seconds: the seconds that the whole took.
        notes: sentences on what to know about the figures.
        versions: the versions of the packages that compiled.
    """

    in_the_shell = True

    model: str
    backend: str
    parameters: int
    batch: tuple[str, ...]
    rows: tuple[ChipAdvice, ...]
    compiles: int
    kept: int
    seconds: float
    notes: tuple[str, ...]
    versions: dict[str, str]

    def __getitem__(self, target: str) -> ChipAdvice:
        """The row of a target, by the name that it was asked for."""
        for row in self.rows:
            if row.target == target:
                return row
        raise KeyError(f"no row {target!r}: there are {', '.join(row.target for row in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        values = plain_values(self)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain |= {name: getattr(row, name) for name in ("verdict", "missing", "changes", "time")}
        return values

    def _title(self) -> str:
        return f"Which chip holds {self.model}"

    def _answer(self) -> list[Sentence]:
        """Which chips hold the step, and with what; then the lines that do it, chip by chip."""
        said = [Sentence(self.model, _headline(self)), _fitting(self)]
        taken = accumulate(len(_lines(row)) for row in self.rows)
        shown = max(1, sum(lines <= _MOST_LINES for lines in taken))
        said.append(Sentence("", "", below=_chips(self.rows[:shown], _NARROW)))
        if len(self.rows) > shown:
            said.append(Sentence("", f"and {len(self.rows) - shown} chips more"))
        for place, row in enumerate(self.rows):
            said.append(Sentence("", _sentence(row), row.code, rank=1 + place))
        return said

    def _tables(self) -> dict[str, list[RenderableType]]:
        changes: list[RenderableType] = []
        for row in self.rows:
            changes += [Sentence("", _sentence(row), row.code), *(Sentence("Note", note) for note in row.notes)]
        steps: list[RenderableType] = [Group(*answer(row.report)) for row in self.rows if row.report is not None]
        notes = [Sentence("Note", note) for note in _notes(self)]
        tables: dict[str, list[RenderableType]] = {
            "chips": [_chips(self.rows, _COLUMNS)],
            "changes": changes,
            "steps": steps,
            "notes": [*notes],
        }
        return {name: parts for name, parts in tables.items() if parts}


_COLUMNS = (
    *("chip", "fits", "measures", "needs", "has", "weights", "optimizer", "temporary", "bound (estimate)"),
    "time (estimate)",
)
_NARROW = ("chip", "fits", "measures", "needs", "has", "time (estimate)")
_RIGHT = _COLUMNS[3:]
_MOST_LINES = 12  # of the table
# What the column "measures" says of a set of them.
_CHANGES = {PLAIN: "none", SAME: "same result", TIME: "slower", OTHER: "other training"}


def _fitting(report: AdviceReport) -> Sentence:
    """How many chips hold the step."""
    fit = [row for row in report.rows if row.fits]
    known = [row for row in report.rows if row.fits is not None]
    unknown = [row.title for row in report.rows if row.fits is None]
    fastest = min((row for row in fit if row.time is not None), key=lambda row: row.time or 0.0, default=None)
    text = f"{len(fit)} of {len(known)} chips {'holds' if len(fit) == 1 else 'hold'} the step." if known else ""
    if fastest is not None and fastest.time is not None and len(fit) > 1:
        text += f" The fastest of them, {fastest.title}, takes {fastest.time * 1e3:.3g} ms (predicted)."
    if unknown:
        text += f" It is not known whether {' or '.join(unknown)} {'holds' if len(unknown) == 1 else 'hold'} it."
    return Sentence("Fits", text.lstrip())


def _chips(rows: Sequence[ChipAdvice], names: Sequence[str]) -> ColumnTable:
    """A table of chips, with some of its columns."""
    places = [_COLUMNS.index(name) for name in names]
    cells = [[line[place] for place in places] for row in rows for line in _lines(row)]
    right = [name for name in names if name in _RIGHT]
    return ColumnTable("Memory of one device", names, _NARROW, right, cells)


def _notes(report: AdviceReport) -> list[str]:
    """What is said of the whole report: its notes, how much was compiled, and by which versions."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [*report.notes, _work(report), versions]


def _headline(report: AdviceReport) -> str:
    """What is asked: the step of which model."""
    return (
        f"{report.parameters:,} parameters, a training step on {', '.join(report.batch)}, lowered by {report.backend}."
    )


def _work(report: AdviceReport) -> str:
    """How much was compiled."""
    return f"{report.compiles} steps compiled, {report.kept} of them earlier; {report.seconds:.0f} s."


def _lines(row: ChipAdvice) -> list[tuple[str, ...]]:
    """A row's cells, and those of the same step in other precisions."""
    kind = _CHANGES.get(row.changes, "-")
    lines = [_cells(row.title, row.fits, kind, row.memory, row.report, row.time)]
    compared = row.report.compared if row.report is not None else {}
    for name, other in compared.items():
        lines.append(_cells(f"  in {name}", other.memory.fits, "", other.memory, other, row.time_of(other)))
    return lines


def _cells(
    name: str, fits: bool | None, kind: str, memory: Memory, report: CompileReport | None, time: float | None
) -> tuple[str, ...]:
    mark = "over " if report is None else "about " if report.extrapolated else ""
    roofline = report.roofline if report is not None else None
    return (
        name,
        {True: "yes", False: "no", None: "not known"}[fits],
        kind,
        mark + byte_size(memory.peak),
        byte_size(memory.capacity),
        byte_size(memory.parameters),
        byte_size(memory.optimizer),
        byte_size(memory.temporary) if report is not None else "-",
        f"{roofline.seconds * 1e3:.3g} ms, {roofline.bound}" if roofline else "-",
        f"{time * 1e3:.3g} ms" if time is not None else "-",
    )


def _sentence(row: ChipAdvice) -> str:
    """The verdict of a row, and its reason."""
    if row.fits and row.measures:
        policy, _, names = row.measures.words.partition(", ")
        text = f"{row.title} fits in {policy}, "
        text += f"with {names} ({row.changes})" if names else "without any measure"
    else:
        text = f"{row.title}: {row.verdict}"
    if row.missing:
        text += f", by {byte_size(row.missing)}"
    text += f". {row.reason}" if row.reason else "."
    text += f" On the host: {on_host(row.report)}" if row.report is not None and row.memory.host else ""
    return text + ("" if row.how == COMPILED else f" (From {row.how}.)")
