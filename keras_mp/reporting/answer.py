"""The answer of a report: sentences for terminal and HTML."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from keras_mp.reporting.html import breakable
from keras_mp.reporting.table import WIDE, ColumnTable, plain_text

LINES, COLUMNS = 25, 80
INDENT = "  "


@dataclass(frozen=True)
class Sentence:
    """A sentence of an answer, and what belongs below it."""

    label: str  # before the words, such as "Fits"; "" where there is none
    text: str  # the words, whose lines are broken
    code: tuple[str, ...] = ()  # lines of a program, below, which are not
    below: RenderableType | None = None  # the table or bar that is shown below, in the terminal
    rank: int = 0  # where there is no room for all, the last one of the highest rank gives way; 0 stays

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, line in enumerate(self._lines(min(options.max_width, WIDE))):
            text = Text(line)
            if number == 0 and self.label:
                text.stylize("bold", 0, len(self.label) + 1)
            yield text
        for line in self.code:
            yield Text(f"{INDENT * 2}{line}", style="bold")
        if self.below is not None:
            yield self.below

    def _lines(self, width: int) -> list[str]:
        return textwrap.wrap(self.words, width, subsequent_indent=INDENT, break_on_hyphens=False) if self.text else []

    @property
    def words(self) -> str:
        """The label and the text."""
        return f"{self.label}: {self.text}" if self.label else self.text

    @property
    def lines(self) -> int:
        """The lines that it takes on a terminal of `COLUMNS`."""
        code = sum(math.ceil((len(line) + 2 * len(INDENT)) / COLUMNS) for line in self.code)
        below = 0 if self.below is None else len(plain_text(self.below, COLUMNS).splitlines())
        return len(self._lines(COLUMNS)) + code + below

    def html(self) -> str:
        """Writes the paragraph, and what is below."""
        label = f"<strong>{escape(self.label)}:</strong> " if self.label else ""
        code = f"<pre><code>{escape(chr(10).join(self.code))}</code></pre>" if self.code else ""
        return (f"<p>{label}{breakable(self.text)}</p>" if self.text else "") + code + html(self.below)


def html(part: RenderableType | None) -> str:
    """Writes a sentence or table as HTML; no bar."""
    if isinstance(part, Group):
        return "".join(map(html, part.renderables))
    return part.html() if isinstance(part, (Sentence, ColumnTable)) else ""


def fitting(sentences: Iterable[Sentence], lines: int = LINES) -> list[Sentence]:
    """Chooses sentences that some lines have room for, in order."""
    kept = list(sentences)
    while sum(sentence.lines for sentence in kept) > lines:
        least = max(sentence.rank for sentence in kept)
        if least == 0:
            break
        place = max(place for place, sentence in enumerate(kept) if sentence.rank == least)
        del kept[place]
    return kept


class Details:
    """The tables behind an answer, for `print` and `rich.print`."""

    def __init__(self, parts: Iterable[RenderableType]) -> None:
        self._parts = list(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for place, part in enumerate(self._parts):
            follows = isinstance(part, Sentence) and isinstance(self._parts[place - 1], Sentence)
            if place and not follows:
                yield ""
            yield part

    def __str__(self) -> str:
        return plain_text(self, WIDE)
