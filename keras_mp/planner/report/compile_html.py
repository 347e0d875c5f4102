"""A compile report as one HTML file, pictures inside."""

from __future__ import annotations

from html import escape

from keras_mp.planner.report import compile_table as told
from keras_mp.planner.report.compilation import Compilation
from keras_mp.reporting.html import document, folded, stacked_bar, table
from keras_mp.reporting.pictures import stacked_bars
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import byte_size


def page(report: Compilation) -> str:
    """The page as text: the answer, two bars, and the tables behind them, folded."""
    first, *sentences = told.answer(report)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    memory = ((what, byte_size(size)) for what, size in told.memory_rows(report))
    parts = [
        f"<h1>{escape(report.model)} on {escape(report.title)}</h1>",
        first.html(),
        *(sentence.html() for sentence in sentences),
        "<h2>Memory</h2>",
        stacked_bar(told.drawn_parts(report.memory), byte_size),
        "<h2>Operations by operand dtype as compiled</h2>",
        stacked_bar(report.shares, "{:.1%}".format),
        "<h2>Details</h2>",
        folded("Memory", table(("what", "size"), memory, numbers=(1,))),
        folded(f"Dots and convolutions: {len(report.matmuls)}", _matmuls(report)),
        *map(_section, (told.sensitive(report), told.precision(report), told.largest(report))),
        _collectives(report),
        _section(told.compared(report)) if report.compared else "",
        folded("Time", "".join(f"<p>{escape(text)}</p>" for text in told.times(report))),
        folded("Notes", "".join(f"<p>{escape(note)}</p>" for note in (*report.notes, told.headline(report), versions))),
    ]
    return document(f"{report.model} on {report.title}", parts)


def picture(report: Compilation) -> str:
    """Memory at the peak and operations by dtype, a bar for each precision that was compiled, as SVG."""
    reports = {report.precision: report, **report.compared}
    memory = {
        f"{name}: {byte_size(other.memory.peak)}": told.drawn_parts(other.memory) for name, other in reports.items()
    }
    operations = {name: other.shares for name, other in reports.items()}
    charts = {
        "Memory of a step at its peak, by what takes it": memory,
        "Operations of the products, by the dtype of their operands as compiled": operations,
    }
    return stacked_bars(f"{report.model}, on {report.title}", charts)


def _collectives(report: Compilation) -> str:
    if not report.collectives:
        return ""
    names = ("kind", "dtype", "devices", "layer", "arrays", "whole", "on the wire", "beside products")
    rows = (
        (
            *(c.kind, c.dtype, str(c.group or "-"), c.layer, str(c.count)),
            *(byte_size(c.bytes), byte_size(c.wire), told.share_of(c.covered, c.wire)),
        )
        for c in report.collectives
    )
    return folded("Collectives a step, bytes of one device", table(names, rows, numbers=(2, 4, 5, 6, 7)))


def _section(drawn: ColumnTable) -> str:
    """A table of the terminal, folded under its title."""
    numbers = [drawn.names.index(name) for name in drawn.right]
    return folded(drawn.title, table(drawn.names, drawn.rows, numbers)) if drawn.rows else ""


def _matmuls(report: Compilation) -> str:
    names = ("layer", "call", "role", "rows x sum x columns", "asked", "compiled", "summed in", "kernel", "FLOP")
    rows = (
        (
            *(m.layer, str(m.call or ""), m.role, told.sizes(m), told.short(m.asked), told.compiled_as(m)),
            *(m.accumulation, m.kernel, told.scaled(m.flops), told.unaligned(m)),
        )
        for m in report.matmuls
    )
    return table((*names, told.UNALIGNED), rows, numbers=(8,))
