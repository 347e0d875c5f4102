"""A compile report as one HTML file, pictures inside."""

from __future__ import annotations

from html import escape

from keras_mp.planner.report import compile_table as told
from keras_mp.planner.report.compilation import Compilation
from keras_mp.reporting.answer import html
from keras_mp.reporting.html import document, folded, stacked_bar
from keras_mp.reporting.pictures import stacked_bars
from keras_mp.reporting.text import byte_size


def page(report: Compilation) -> str:
    """Writes the page: answer, bars, and folded tables."""
    parts = [
        f"<h1>{escape(report.model)} on {escape(report.title)}</h1>",
        *(sentence.html() for sentence in told.answer(report)),
        "<h2>Memory</h2>",
        stacked_bar(told.drawn_parts(report.memory), byte_size),
        "<h2>Operations by operand dtype as compiled</h2>",
        stacked_bar(report.shares, "{:.1%}".format),
        "<h2>Details</h2>",
        *(folded(name.capitalize(), "".join(map(html, behind))) for name, behind in told.tables(report).items()),
    ]
    return document(f"{report.model} on {report.title}", parts)


def picture(report: Compilation) -> str:
    """Draws memory and operations, a bar for each precision."""
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
