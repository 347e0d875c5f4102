"""An advice report on the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from keras_mp.advice.advised import Advised
from keras_mp.advice.chip_advice import ChipAdvice
from keras_mp.reporting.table import ColumnTable, Prose
from keras_mp.reporting.text import byte_size

COLUMNS = ("chip", "fits", "needs", "has", "weights", "optimizer", "temporary", "bound (estimate)", "time (estimate)")
_NARROW = ("chip", "fits", "needs", "has", "time (estimate)")
_INDENT = "    "
_RIGHT = COLUMNS[2:]


def render(report: Advised) -> Group:
    """The report for rich."""
    table = ColumnTable("Memory of one device", COLUMNS, _NARROW, _RIGHT)
    for row in report.rows:
        table.add_row(*cells(row))
    parts: list = [Text(headline(report), style="bold"), table]
    for row in report.rows:
        parts += [Text(sentence(row)), *(Text(f"{_INDENT}{line}", style="bold") for line in row.code)]
        parts += [Prose(f"Note: {note}", _INDENT) for note in row.notes]
    parts += [Prose(f"Note: {note}") for note in report.notes]
    return Group(*parts, Text(work(report)))


def headline(report: Advised) -> str:
    """What is asked: the step of which model."""
    return (
        f"{report.model}, {report.parameters:,} parameters: a training step on {', '.join(report.batch)}, lowered by "
        f"{report.backend}"
    )


def work(report: Advised) -> str:
    """How much was compiled."""
    return f"{report.compiles} steps compiled, {report.kept} of them earlier; {report.seconds:.0f} s."


def cells(row: ChipAdvice) -> tuple[str, ...]:
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


def sentence(row: ChipAdvice) -> str:
    """The verdict of a row, and its reason."""
    if row.fits and row.measures:
        text = f"{row.title} fits with {row.measures.words}"
    else:
        text = f"{row.title}: {row.verdict}"
    if row.missing:
        text += f", by {byte_size(row.missing)}"
    text += f". {row.reason}" if row.reason else "."
    return text + ("" if row.how == "compiled" else f" (From {row.how}.)")
