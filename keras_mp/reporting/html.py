"""The HTML pages of the kit's reports: one file each, pictures inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; margin: 0 0 2em; font-size: 13px; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #d8dee4; vertical-align: top; }
th { position: sticky; top: 0; background: #fff; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
h2 { margin: 2em 0 .5em; font-size: 18px; }
svg { display: block; margin: 0 0 1em; }
code { background: #f3f4f6; padding: 1px 4px; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page as text.

    Args:
        title: of the window.
        parts: the body, in HTML.
    """
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>\n'


def table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table.

    Args:
        names: of the columns.
        rows: the cells as text.
        numbers: places of the columns to set to the right.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{escape(cell)}</td>' if place in numbers else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
