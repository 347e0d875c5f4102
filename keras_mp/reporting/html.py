"""The HTML pages of reports, dark or light."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --ground: #ffffff; --line: #d8dee4; --code: #f3f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --ground: #16191d; --line: #3a4149; --code: #262c33; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; overflow-wrap: anywhere;
  color: var(--text); background: var(--ground); }
h1 { font-size: 24px; line-height: 1.25; }
details { border-top: 1px solid var(--line); }
summary { padding: .5em 0; font-weight: 600; cursor: pointer; }
.scroll { overflow-x: auto; margin: 0 0 1.5em; }
table { border-collapse: collapse; font-size: 13px; overflow-wrap: normal; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
code { background: var(--code); padding: 1px 4px; }
pre { overflow-x: auto; }
pre code { display: block; width: fit-content; min-width: 100%; box-sizing: border-box; padding: 6px 8px; }
@media (max-width: 40em) { body { margin: 1em auto; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A page: its title, and the HTML of its body."""
    head = (
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    )
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>\n'


def folded(title: str, body: str) -> str:
    """What is shown when its title is chosen."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Writes a table, which scrolls where the page is narrower.

    Args:
        names: the names of the columns; where all are empty, the table has no header.
        rows: the cells as text.
        numbers: places of the columns to set to the right, with their names.
    """
    head = f"<thead>{_row('th', names, numbers)}</thead>" if any(names) else ""
    body = "".join(_row("td", row, numbers) for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _row(tag: str, cells: Sequence[str], numbers: Collection[int]) -> str:
    classes = (' class="number"' if place in numbers else "" for place in range(len(cells)))
    written = (f"<{tag}{kind}>{breakable(cell)}</{tag}>" for kind, cell in zip(classes, cells, strict=True))
    return f"<tr>{''.join(written)}</tr>"


def breakable(text: str) -> str:
    """Escapes a path, with room to break after each name."""
    return re.sub(r"([/_])", r"\1<wbr>", escape(text, quote=False))
