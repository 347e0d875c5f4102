"""Bars beside each other as a picture: one colour for what is looked at, another for what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keras_mp.reporting.svg import COLOURS, INK, Picture

_LONGEST = 360  # pixels
_OURS, _OTHER = COLOURS[0], "#999999"


class Bar(NamedTuple):
    """A bar.

    Attributes:
        name: stands left of it.
        length: in any unit; None where there is nothing to draw.
        low, high: the ends of a line on it.
        words: stand right of it.
        highlighted: whether it has the first of the two colours.
    """

    name: str
    length: float | None
    low: float
    high: float
    words: str
    highlighted: bool


def bar_chart(title: str, below: str, bars: Sequence[Bar], *, inside_html: bool = False) -> str:
    """Draws bars, one below the other.

    Args:
        title: above them.
        below: a line below the title, on what the bars and their lines are.
        bars: from top to bottom.
        inside_html: whether the picture is an element of a page.
    """
    longest = max((bar.high for bar in bars if bar.length is not None), default=1.0)
    drawing = Picture(0, 72 + 26 * len(bars), font_size=13)
    left = 20 + max(drawing.text_width(bar.name) for bar in bars)
    words = max(drawing.text_width(bar.words) for bar in bars)
    drawing.width = max(left + _LONGEST + words + 24, 600)
    drawing.text(8, 20, title, bold=True, room=drawing.width - 16)
    drawing.text(8, 42, below, room=drawing.width - 16)
    for place, bar in enumerate(bars):
        top = 58 + 26 * place
        drawing.text(left - 8, top + 14, bar.name, anchor="end")
        end = 0.0
        if bar.length is not None:
            pixels, low, high = (_LONGEST * value / longest for value in (bar.length, bar.low, bar.high))
            drawing.rectangle(left, top, pixels, 18, _OURS if bar.highlighted else _OTHER)
            drawing.rule(left + low, top + 9, left + high, top + 9, INK)
            end = max(pixels, high) + 6
        drawing.text(left + end, top + 14, bar.words)
    return drawing.svg(inside_html=inside_html)


def as_long(ratio: float) -> str:
    """A ratio of two times in words: "6% longer", "9% shorter", "as long", "2.5 times as long"."""
    if ratio >= 1.995:
        return f"{ratio:.2g} times as long"
    percent = round(100 * (ratio - 1))
    return f"{abs(percent)}% {'longer' if percent > 0 else 'shorter'}" if percent else "as long"
