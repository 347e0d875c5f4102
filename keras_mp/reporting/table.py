"""Reports as text, and a table that shows fewer columns where the terminal is narrow."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from keras_mp.reporting.text import shorten_middle

WIDE = 120  # characters; most terminals open with 80


def plain_text(renderable: RenderableType, width: int) -> str:
    """What rich would print on so many columns without colours, as text; lines of prose are not wrapped."""
    # In a notebook rich shows its output by itself, beside the text, unless it is told not to.
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False, force_jupyter=False)
    console.print(renderable, soft_wrap=True)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, its columns after the first set to the right."""
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]


class Prose:
    """A paragraph whose lines are as long as the terminal is wide, also where lines are not broken otherwise.

    Args:
        text: words alone: a command that is to be copied would be broken, too.
        indent: before each line; lines after the first have two spaces more.
    """

    def __init__(self, text: str, indent: str = "") -> None:
        self.text, self.indent = text, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        following = f"{self.indent}  "
        width = min(options.max_width, WIDE)
        for line in textwrap.wrap(self.text, width, initial_indent=self.indent, subsequent_indent=following):
            yield Text(line)


class ColumnTable:
    """A table whose columns depend on the width that there is.

    Args:
        title: written above it.
        names: of the columns.
        narrow: the names of those that are shown on less than `WIDE` characters; the caption names the others.
        right: the names of those that are set to the right.
        rows: the cells of each row, one for each column.

    On less than `WIDE` characters the cells of the column "layer" lose their middle.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        narrow: Collection[str],
        right: Collection[str] = (),
        rows: Iterable[Sequence[str]] = (),
    ) -> None:
        self.title, self.names, self.narrow, self.right = title, names, narrow, right
        self.caption = ""
        self.rows = list(rows)

    def add_row(self, *cells: str) -> None:
        """Adds a row, a cell for each column."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wide = options.max_width >= WIDE
        shown = [place for place, name in enumerate(self.names) if wide or name in self.narrow]
        hidden = [name for name in self.names if not wide and name not in self.narrow]
        captions = [self.caption, f"a terminal of {WIDE} columns also shows: {', '.join(hidden)}" if hidden else ""]
        caption = "; ".join(filter(None, captions))
        wrapped: dict[str, Any] = {"no_wrap": False, "overflow": "fold"}  # also where lines of prose are not
        table = Table(
            title=Text(self.title, "table.title", **wrapped),
            title_justify="left",
            caption=Text(caption, "table.caption", **wrapped) if caption else None,
        )
        for place in shown:
            name = self.names[place]
            table.add_column(name, justify="right" if name in self.right else "left", overflow="fold")
        for cells in self.rows:
            table.add_row(*(self._cell(cells[place], self.names[place], options) for place in shown))
        yield table

    def _cell(self, cell: str, name: str, options: ConsoleOptions) -> str:
        narrow = name == "layer" and options.max_width < WIDE
        return shorten_middle(cell, options.max_width * 2 // 5) if narrow else cell
