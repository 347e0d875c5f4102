"""Text and tables for the columns there are."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from keras_mp.reporting.html import table as html_table
from keras_mp.reporting.text import shorten_middle

WIDE = 120  # characters; most terminals open with 80
_NAMES = ("layer", "layers", "chip")
_LEAST = 16  # characters of a name
_WORDS = 30  # characters; a longer cell is prose
_BETWEEN = 2  # blanks between columns


def plain_text(renderable: RenderableType, width: int) -> str:
    """Prints into text, on some columns, without colours."""
    # In a notebook rich shows its output by itself, beside the text, unless it is told not to.
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False, force_jupyter=False)
    console.print(renderable, soft_wrap=True)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines).rstrip()


class ColumnTable:
    """A table whose columns depend on the width there is.

    Args:
        title: the text above it.
        names: the names of the columns.
        narrow: the names of those that are shown on less than `WIDE` characters; the caption names the others.
        right: the names of those that are set to the right.
        rows: the cells of each row, one for each column.

    A name in the column "layer", "layers" or "chip" loses its middle where there is no room for it. Only words are
    broken over lines.
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

    def html(self) -> str:
        """The title, all columns, and the caption."""
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        caption = f"<p>{escape(self.caption)}</p>" if self.caption else ""
        return title + html_table(self.names, self.rows, [self.names.index(name) for name in self.right]) + caption

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
            caption_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        room, broken = self._room(shown, options.max_width)
        for place in shown:
            name = self.names[place]
            justify: JustifyMethod = "right" if name in self.right else "left"
            if place in broken:
                table.add_column(name, justify=justify, overflow="fold", min_width=self._width(place, words=True))
            else:
                table.add_column(name, justify=justify, overflow="fold", no_wrap=True)
        for cells in self.rows:
            shown_cells = [(self.names[place], cells[place]) for place in shown]
            table.add_row(*(shorten_middle(cell, room) if name in _NAMES else cell for name, cell in shown_cells))
        yield table

    def _width(self, place: int, words: bool = False) -> int:
        """The characters of a column's longest cell or word."""
        texts = [self.names[place], *(cells[place] for cells in self.rows)]
        return max(len(part) for text in texts for part in (text.split() or [""] if words else [text]))

    def _room(self, shown: Sequence[int], width: int) -> tuple[int, set[int]]:
        """The characters for a name, and the broken columns."""
        names = [place for place in shown if self.names[place] in _NAMES]
        others = [place for place in shown if place not in names]
        # Prose is broken between words, and whatever else a name needs the room of.
        cells = [(place, row[place]) for place in others for row in self.rows]
        broken = {place for place, cell in cells if len(cell) > _WORDS and " " in cell}
        widths = {place: min(self._width(place), _WORDS if place in broken else width) for place in others}
        gains = {place: widths[place] - self._width(place, words=True) for place in others}

        def left() -> int:
            return width - sum(widths.values()) - _BETWEEN * (len(shown) - 1) - 1  # rich pads the last column, too

        for place in reversed([place for place in others if gains[place] > 0]):  # the last matter least
            if left() >= _LEAST * len(names):
                break
            broken.add(place)
            widths[place] -= gains[place]
        return max(_LEAST, left() // max(1, len(names))), broken
