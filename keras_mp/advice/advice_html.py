"""An advice report as one HTML file."""

from __future__ import annotations

from html import escape

from keras_mp.advice.advice_table import COLUMNS, cells, headline, sentence, work
from keras_mp.advice.advised import Advised
from keras_mp.reporting.html import document, scrolling, table
from keras_mp.reporting.svg import GRID, Picture, colours_of

_WIDTH, _LABEL = 900, 260


def page(report: Advised) -> str:
    """The page as text."""
    parts = [
        f"<h1>Which chip holds {escape(report.model)}</h1>",
        f"<p>{escape(headline(report))}</p>",
        table(COLUMNS, map(cells, report.rows), numbers=range(2, 8)),
        "<h2>Memory of one device, by the memory it has</h2>",
        _picture(report),
        "<h2>What makes it fit</h2>",
    ]
    for row in report.rows:
        code = f"<pre><code>{escape(chr(10).join(row.code))}</code></pre>" if row.code else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in row.notes)
        parts.append(f"<p>{escape(sentence(row))}</p>{code}{notes}")
    parts += ["<h2>Notes</h2>", *(f"<p>{escape(note)}</p>" for note in report.notes)]
    parts.append(f"<p>{escape(work(report))}</p>")
    parts.append(f"<p>{escape(', '.join(f'{name} {version}' for name, version in report.versions.items()))}</p>")
    return document(f"Which chip holds {report.model}", parts)


def _picture(report: Advised) -> str:
    """A bar for each chip: what takes its memory, and how much is free; a line where its memory ends."""
    bars = []
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
        free = max(0, row.capacity - figures.peak)
        bars.append((row, {name: size / row.capacity for name, size in parts.items()} | {"free": free / row.capacity}))
    if not bars:
        return ""
    colours = colours_of([name for name in bars[0][1] if name != "free"]) | {"free": GRID}
    room = (_WIDTH - _LABEL - 10) / max(1.0, *(sum(parts.values()) for _, parts in bars))
    drawing = Picture(_WIDTH, font_size=13)
    y = 24.0
    for row, shares in bars:
        drawing.text(10, y, f"{row.title}: {cells(row)[1]}", room=_LABEL - 14)
        drawing.stacked_bar(_LABEL, y - 15, room * sum(shares.values()), 20, shares, colours)
        drawing.rule(_LABEL + room, y - 18, _LABEL + room, y + 8)
        y += 28
    drawing.height = drawing.legend(10, y + 6, colours, columns=3)
    return scrolling(drawing.svg(inside_html=True))
