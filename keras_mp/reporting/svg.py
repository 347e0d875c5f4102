"""Pictures as SVG: text, bars, lines, axes and legends, placed in pixels from the upper left corner."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
INK, FRAME, GRID = "#1b1f24", "#666666", "#e5e7eb"
# The reader's dark mode, by class; where a program knows no CSS, the attributes of the elements are the light mode.
DARK_STYLE = """
@media (prefers-color-scheme: dark) {
  svg .ground { fill: #16191d; }
  svg text:not([fill]) { fill: #e6e8eb; }
  svg .ink { stroke: #e6e8eb; }
  svg .frame { stroke: #9aa3ad; }
  svg .grid { stroke: #3a4149; }
}
"""
_CLASSES = {INK: "ink", FRAME: "frame", GRID: "grid"}
# The mean width of a character, as a share of the font's size: system fonts have 0.5 to 0.6.
_CHARACTER = 0.6


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Chooses round numbers from low to high, at most so many: multiples of 1, 2 or 5 times a power of ten."""
    step = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


@dataclass(frozen=True)
class Axes:
    """The rectangle that data is drawn in, and the data at its edges.

    Args:
        left, top, right, bottom: the edges in pixels.
        x: the data at the left and right edge.
        y: the data at the lower and upper edge.
    """

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The pixels of a point of the data."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


class Picture:
    """A picture that is being drawn.

    Args:
        width: the width in pixels.
        height: the height in pixels; may be set until `svg` is called.
        font_size: the size of all text, in pixels.
    """

    def __init__(self, width: float, height: float = 0.0, font_size: int = 12) -> None:
        self.width, self.height, self.font_size = width, height, font_size
        self._elements: list[str] = []

    def svg(self, *, inside_html: bool = False) -> str:
        """The picture as an SVG document, or as an element of an HTML page, whose style has `DARK_STYLE`."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        font = f'font-family="system-ui, sans-serif" font-size="{self.font_size}"'
        ground = f'<rect class="ground" width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        body = "".join([ground, *self._elements])
        if inside_html:
            return f'<svg {size} {font} role="img">{body}</svg>\n'
        style = f"<style>{DARK_STYLE}</style>"
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">{style}{body}</svg>\n'

    def text_width(self, words: str) -> float:
        """The room that words take, in pixels: an estimate, because the reader's font is not known."""
        return _CHARACTER * self.font_size * len(words)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        fill: str = "",
        room: float | None = None,
    ) -> None:
        """Writes words on one line.

        Args:
            x, y: the start, middle or end of the base line, as anchor says.
            words: any text.
            anchor: "start", "middle" or "end".
            bold: whether the letters are bold.
            fill: the colour of the letters, also in dark mode; where it is not given, that of the text of the page.
            room: pixels to keep within. Longer words lose their end, or with the anchor "end" their beginning, and
                are shown whole where the mouse rests on them.
        """
        extra = f' text-anchor="{anchor}"' if anchor != "start" else ""
        extra += ' font-weight="bold"' if bold else ""
        extra += f' fill="{fill}"' if fill else ""
        shown, title = words, ""
        if room is not None and self.text_width(words) > room:
            fitting = max(1, int(room / self.text_width("x")) - 1)
            shown = f"…{words[-fitting:]}" if anchor == "end" else f"{words[:fitting]}…"
            title = _title(words)
        self._elements.append(f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{_escaped(shown)}{title}</text>')

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = "", *, opacity: float = 1.0
    ) -> None:
        """Draws a filled rectangle; the title is shown where the mouse rests on it."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        place += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        end = f">{_title(title)}</rect>" if title else "/>"
        self._elements.append(f'<rect {place} fill="{fill}"{end}')

    def rule(self, x1: float, y1: float, x2: float, y2: float, colour: str = FRAME) -> None:
        """Draws one straight line, a pixel wide; `INK`, `FRAME` and `GRID` follow the reader's dark mode."""
        kind = f' class="{_CLASSES[colour]}"' if colour in _CLASSES else ""
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._elements.append(f'<line{kind} {place} stroke="{colour}"/>')

    def dot(self, x: float, y: float, colour: str, title: str = "") -> None:
        """Draws a filled circle around a point; the title is shown where the mouse rests on it."""
        self._elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}">{_title(title)}</circle>')

    def curve(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.2) -> None:
        """Draws straight lines from point to point."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._elements.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def area(self, points: Iterable[tuple[float, float]], colour: str, opacity: float = 1.0) -> None:
        """Fills what straight lines from point to point, and back to the first, enclose."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._elements.append(f'<polygon points="{places}" fill="{colour}" fill-opacity="{opacity:g}"/>')

    def stacked_bar(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        parts: Mapping[str, float],
        colours: Mapping[str, str],
        written: Callable[[float], str] = "{:.4g}".format,
    ) -> None:
        """Draws a bar whose parts share its width in proportion.

        Args:
            x, y, width, height: the place and size of the whole bar.
            parts: the value of each part by name, from left to right.
            colours: the colours of the parts, by name.
            written: a function that writes a value, which is shown where the mouse rests on its part.
        """
        whole = sum(parts.values()) or 1.0
        for name, value in parts.items():
            self.rectangle(x, y, width * value / whole, height, colours[name], f"{name}: {written(value)}")
            x += width * value / whole

    def legend(self, x: float, y: float, colours: Mapping[str, str], columns: int = 1, spacing: float = 260.0) -> float:
        """Names colours, each beside a square of it.

        Args:
            x, y: the lower left corner of the first square.
            colours: the colours by name.
            columns: the number of names that stand beside each other.
            spacing: the pixels from column to column.

        Returns:
            Where the next line of text goes, in pixels from above.
        """
        for place, (name, colour) in enumerate(colours.items()):
            across, down = place % columns, place // columns
            self.rectangle(x + spacing * across, y + 20 * down - 11, 12, 12, colour)
            self.text(x + spacing * across + 18, y + 20 * down, name, room=spacing - 24 if columns > 1 else None)
        return y + 20 * -(-len(colours) // columns)

    def axes(self, axes: Axes, x_title: str, y_title: str, *, x_numbers: bool = True) -> None:
        """Draws two axes with ticks, their numbers (those of x only if they are wanted), a grid and titles.

        The numbers of y stand left of the rectangle, those of x and its title below, the title of y above.
        """
        for value in ticks(*axes.y):
            _, y = axes.place(axes.x[0], value)
            self.rule(axes.left, y, axes.right, y, GRID)
            self.text(axes.left - 6, y + 4, f"{value:.6g}", anchor="end")
        for value in ticks(*axes.x) if x_numbers else ():
            x, _ = axes.place(value, axes.y[0])
            self.rule(x, axes.bottom, x, axes.bottom + 4)
            written = f"{value:.6g}"
            within = self.width - self.text_width(written) / 2
            self.text(min(x, within), axes.bottom + 17, written, anchor="middle")
        self.rule(axes.left, axes.top, axes.left, axes.bottom)
        self.rule(axes.left, axes.bottom, axes.right, axes.bottom)
        if x_title:
            self.text((axes.left + axes.right) / 2, axes.bottom + 34, x_title, anchor="middle")
        if y_title:
            self.text(axes.left, axes.top - 8, y_title)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; after the eighth they begin again."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def _title(words: str) -> str:
    return f"<title>{_escaped(words)}</title>"


def _escaped(words: str) -> str:
    """Text of XML, which has no way to write control characters, nor half of a pair of surrogates."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))
