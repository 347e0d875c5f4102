"""A compile report as one HTML file, pictures inside."""

from __future__ import annotations

from html import escape

from keras_mp.planner.report import compile_table as told
from keras_mp.planner.report.compilation import Compilation
from keras_mp.reporting.answer import html
from keras_mp.reporting.html import document, folded, stacked_bar
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
