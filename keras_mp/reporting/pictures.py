"""Pictures that several reports have: bars beside each other, and curves as differences from a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_mp.reporting.svg import COLOURS, FRAME, INK, Axes, Picture, colours_of

_LONGEST = 360  # pixels
_OURS, _OTHER = COLOURS[0], "#999999"
_BAND = 0.22  # how much of the ground the band of the seeds covers


class Bar(NamedTuple):
    """A bar.

    Attributes:
        name: the text left of it.
        length: the length in any unit; None where there is nothing to draw.
        low, high: the ends of a line on it.
        words: the text right of it.
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
        title: the text above them.
        below: a line below the title, on what the bars and their lines are.
        bars: the bars, from top to bottom.
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


def difference_picture(
    curves: Mapping[str, Sequence[Sequence[float]]],
    reference: str,
    *,
    x_title: str,
    y_title: str,
    first: int = 1,
    inside_html: bool = False,
) -> str:
    """Draws, for each precision, the mean over the seeds of its curve less the reference's of the same seed.

    A grey band shows how far the reference's own seeds lie from their mean: a line inside it is within seed noise.

    Args:
        curves: a curve a seed, all of one length, by precision; what is not finite ends its line.
        reference: the precision that the others are compared with.
        x_title: the name of what curves go over, such as "step".
        y_title: the name of the differences.
        first: x of the first point.
        inside_html: whether the picture is an element of a page.
    """
    base = np.asarray(curves[reference], "float64")
    apart = base - base.mean(0)
    low, high = apart.min(0), apart.max(0)
    with np.errstate(invalid="ignore"):
        lines = {name: (np.asarray(seeds) - base).mean(0) for name, seeds in curves.items() if name != reference}
    drawing = Picture(760, 440)
    last = first + base.shape[1] - 1
    axes = Axes(84, 60, 748, 384, (first, max(last, first + 1)), _limits(low, high, lines))
    drawing.text(10, 20, y_title, bold=True, room=740)
    drawing.axes(axes, x_title, "")
    steps = range(first, last + 1)
    if len(base) > 1:
        edges = [*zip(steps, high, strict=True), *reversed([*zip(steps, low, strict=True)])]
        drawing.area((_clipped(axes, x, y) for x, y in edges if np.isfinite(y)), FRAME, _BAND)
    drawing.rule(*axes.place(first, 0.0), *axes.place(axes.x[1], 0.0))
    colours = colours_of(list(lines))
    for name, line in lines.items():
        drawing.curve(
            [_clipped(axes, x, y) for x, y in zip(steps, line, strict=True) if np.isfinite(y)], colours[name], 2.0
        )
    drawing.legend(axes.left, 44, colours, columns=4, spacing=165)
    below = f"0 is {reference}"
    if len(base) > 1:
        below += f"; grey: how far its own {len(base)} seeds lie from their mean"
    drawing.text(axes.left, 432, below)
    return drawing.svg(inside_html=inside_html)


def _limits(low: np.ndarray, high: np.ndarray, lines: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """The data at the lower and the upper edge: all of the lines, and of the band what is not the rare extreme."""
    band = np.concatenate([low, high])
    band = band[np.isfinite(band)]
    ends = [0.0, *(np.quantile(band, [0.05, 0.95]) if band.size else [])]
    ends += [float(value) for line in lines.values() for value in line if np.isfinite(value)]
    room = 0.05 * (max(ends) - min(ends)) or 1.0
    return min(ends) - room, max(ends) + room


def _clipped(axes: Axes, x: float, y: float) -> tuple[float, float]:
    return axes.place(x, min(max(y, axes.y[0]), axes.y[1]))
