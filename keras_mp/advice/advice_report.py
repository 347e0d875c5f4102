"""The report of `advise`: a row for each chip, that can be printed and written as JSON or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import RenderableType

from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.html import document, folded, limited_bars, table
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import byte_size
from keras_mp.xla.estimate import Roofline

COMPILED, FROM_SHAPES = "compiled", "shapes alone"


@dataclass(frozen=True)
class ChipAdvice:
    """Whether a chip holds a training step, and under which measures; a row of the report.

    Args:
        target: the chip as it was asked for, such as "rtx4090x4".
        title: its name as people write it, with the number of chips.
        devices: how many share the step.
        capacity: memory of one device, in bytes, of a GPU as its driver reports it.
        fits: whether it holds the step under `measures`; None where this is not known.
        measures: the cheapest set that fits; where none does, the one that comes nearest; None where nothing was
            compiled.
        figures: of one device under these measures; from shapes alone, temporary memory is 0.
        roofline: what the chip's rates allow, an estimate, of one micro-batch; None where nothing was compiled.
        time: of an update, all of its micro-batches, predicted, in seconds; None where nothing was compiled for this
            chip itself.
        how: "compiled", "shapes alone", or how else the figures were found.
        reason: where it does not fit, what takes the memory; where this is not known, why.
        code: the lines that apply the measures, runnable where `build` is.
        compiles: how many sets of measures were compiled for this chip.
        shared: of these, how many were compiled for another chip of the report already.
        notes: what to know of the measures.
    """

    target: str
    title: str
    devices: int
    capacity: int
    fits: bool | None
    measures: Measures | None
    figures: Figures
    roofline: Roofline | None
    how: str
    reason: str = ""
    code: tuple[str, ...] = ()
    compiles: int = 0
    shared: int = 0
    notes: tuple[str, ...] = ()
    time: float | None = None

    @property
    def missing(self) -> int:
        """Bytes by which the step is larger than the memory; 0 where it fits, or where this is not known."""
        return max(0, self.figures.peak - self.capacity) if self.fits is False else 0

    @property
    def verdict(self) -> str:
        """In a word: "fits", "does not fit" or "not known"."""
        return {True: "fits", False: "does not fit", None: "not known"}[self.fits]


@dataclass(frozen=True)
class AdviceReport(Report):
    """Which chips hold the training of a model, and what makes it fit.

    Args:
        model: its name.
        backend: "tensorflow" or "jax".
        parameters: number of its weights' elements.
        batch: shape and dtype of each array of the batch, which is that of all devices and micro-batches.
        rows: a `ChipAdvice` for each chip, in the order of the targets.
        compiles: how many steps were compiled, or taken from what was kept.
        kept: how many of these were taken from what an earlier call compiled.
        seconds: that the whole took.
        notes: what to know about the figures.
        versions: of the packages that compiled.
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
            plain |= {"verdict": row.verdict, "missing": row.missing}
        return values

    def _html(self) -> str:
        return _page(self)

    def _answer(self) -> list[Sentence]:
        return _answered(self)

    def _tables(self) -> dict[str, list[RenderableType]]:
        return _tabled(self)


_COLUMNS = ("chip", "fits", "needs", "has", "weights", "optimizer", "temporary", "bound (estimate)", "time (estimate)")
_NARROW = ("chip", "fits", "needs", "has", "time (estimate)")
_RIGHT = _COLUMNS[2:]
_MOST_ROWS = 12


def _answered(report: AdviceReport) -> list[Sentence]:
    """Which chips hold the step, and with what; then the lines that do it, chip by chip."""
    said = [Sentence(report.model, _headline(report)), _fitting(report)]
    said.append(Sentence("", "", below=_chips(report.rows[:_MOST_ROWS], _NARROW)))
    if len(report.rows) > _MOST_ROWS:
        said.append(Sentence("", f"and {len(report.rows) - _MOST_ROWS} chips more"))
    for place, row in enumerate(report.rows):
        said.append(Sentence("", _sentence(row), row.code, rank=1 + place))
    return said


def _fitting(report: AdviceReport) -> Sentence:
    """How many chips hold the step."""
    fit = [row for row in report.rows if row.fits]
    fastest = min((row for row in fit if row.time is not None), key=lambda row: row.time or 0.0, default=None)
    text = f"{len(fit)} of {len(report.rows)} chips {'holds' if len(fit) == 1 else 'hold'} the step."
    if fastest is not None and fastest.time is not None and len(fit) > 1:
        text += f" The fastest of them, {fastest.title}, takes {fastest.time * 1e3:.3g} ms (predicted)."
    return Sentence("Fits", text)


def _chips(rows: Sequence[ChipAdvice], names: Sequence[str]) -> ColumnTable:
    """A table of chips, with some of its columns."""
    places = [_COLUMNS.index(name) for name in names]
    cells = [[row[place] for place in places] for row in map(_cells, rows)]
    right = [name for name in names if name in _RIGHT]
    return ColumnTable("Memory of one device", names, _NARROW, right, cells)


def _tabled(report: AdviceReport) -> dict[str, list[RenderableType]]:
    changes: list[RenderableType] = []
    for row in report.rows:
        changes += [Sentence("", _sentence(row), row.code), *(Sentence("Note", note) for note in row.notes)]
    notes = [Sentence("Note", note) for note in _notes(report)]
    return {"chips": [_chips(report.rows, _COLUMNS)], "changes": changes, "notes": [*notes]}


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


def _cells(row: ChipAdvice) -> tuple[str, ...]:
    """A row's cells."""
    figures, compiled = row.figures, row.measures is not None
    mark = "over " if not compiled else "about " if figures.extrapolated else ""
    return (
        row.title,
        {True: "yes", False: "no", None: "not known"}[row.fits],
        mark + byte_size(figures.peak),
        byte_size(row.capacity),
        byte_size(figures.weights),
        byte_size(figures.optimizer),
        byte_size(figures.temporary) if compiled else "-",
        f"{row.roofline.seconds * 1e3:.3g} ms, {row.roofline.bound}" if row.roofline else "-",
        f"{row.time * 1e3:.3g} ms" if row.time is not None else "-",
    )


def _sentence(row: ChipAdvice) -> str:
    """The verdict of a row, and its reason."""
    if row.fits and row.measures:
        text = f"{row.title} fits with {row.measures.words}"
    else:
        text = f"{row.title}: {row.verdict}"
    if row.missing:
        text += f", by {byte_size(row.missing)}"
    text += f". {row.reason}" if row.reason else "."
    return text + ("" if row.how == "compiled" else f" (From {row.how}.)")


def _page(report: AdviceReport) -> str:
    """The page as text."""
    parts = [
        f"<h1>Which chip holds {escape(report.model)}</h1>",
        f"<p>{escape(_headline(report))}</p>",
        _fitting(report).html(),
        table(_COLUMNS, map(_cells, report.rows), numbers=range(2, len(_COLUMNS))),
        "<h2>Memory of one device, by the memory it has</h2>",
        _picture(report),
        "<h2>What makes it fit</h2>",
    ]
    for row in report.rows:
        code = f"<pre><code>{escape(chr(10).join(row.code))}</code></pre>" if row.code else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in row.notes)
        parts.append(f"<h3>{escape(row.title)}</h3><p>{escape(_sentence(row))}</p>{code}{notes}")
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(report))
    parts.append(folded("Notes", notes))
    return document(f"Which chip holds {report.model}", parts)


def _picture(report: AdviceReport) -> str:
    """A bar for each chip: what takes its memory, and how much is free; a line where its memory ends."""
    bars = {}
    for row in report.rows:
        figures = row.figures
        rest = max(0, figures.peak - figures.state - figures.activations)
        parts = {
            "weights": figures.weights,
            "optimizer": figures.optimizer,
            "metrics and batch": figures.other,
            "kept for the backward pass": figures.activations,
            "other temporary": rest,
        }
        shares = {name: size / row.capacity for name, size in parts.items()}
        title = f"{row.title}: {_cells(row)[2]} of {byte_size(row.capacity)}"
        bars[title] = shares
    return limited_bars(bars, "{:.1%} of the memory".format, "free", "all of the memory") if bars else ""
