"""An advice report as one HTML file."""

from __future__ import annotations

from html import escape

from keras_mp.advice.advice_table import COLUMNS, cells, headline, sentence, work
from keras_mp.advice.advised import Advised
from keras_mp.reporting.html import document, limited_bars, table
from keras_mp.reporting.text import byte_size


def page(report: Advised) -> str:
    """The page as text."""
    parts = [
        f"<h1>Which chip holds {escape(report.model)}</h1>",
        f"<p>{escape(headline(report))}</p>",
        table(COLUMNS, map(cells, report.rows), numbers=range(2, len(COLUMNS))),
        "<h2>Memory of one device, by the memory it has</h2>",
        _picture(report),
        "<h2>What makes it fit</h2>",
    ]
    for row in report.rows:
        code = f"<pre><code>{escape(chr(10).join(row.code))}</code></pre>" if row.code else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in row.notes)
        parts.append(f"<h3>{escape(row.title)}</h3><p>{escape(sentence(row))}</p>{code}{notes}")
    parts += ["<h2>Notes</h2>", *(f"<p>{escape(note)}</p>" for note in report.notes)]
    parts.append(f"<p>{escape(work(report))}</p>")
    parts.append(f"<p>{escape(', '.join(f'{name} {version}' for name, version in report.versions.items()))}</p>")
    return document(f"Which chip holds {report.model}", parts)


def _picture(report: Advised) -> str:
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
        title = f"{row.title}: {cells(row)[2]} of {byte_size(row.capacity)}"
        bars[title] = shares
    return limited_bars(bars, "{:.1%} of the memory".format, "free", "all of the memory") if bars else ""
