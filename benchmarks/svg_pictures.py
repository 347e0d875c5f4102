"""Pictures of the pages as SVG, drawn by matplotlib: stacked bars, and curves as differences from a reference."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from keras_mp.reporting.text import shorten_middle

# Colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
OTHER = COLOURS[-1]
_NAME, LINE = 44, 110  # characters
BAND = 0.22  # how much of the ground the band of the seeds covers
# Letters are text, in the reader's font, and a name is shown as it is written. The ids of the elements do not change.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "keras_mp",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Colours for names; after the eighth they begin again."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def svg(draw: Callable[[Any], None], width: float, height: float) -> str:
    """Draws a picture.

    Args:
        draw: a function that draws into the `matplotlib.figure.Figure` that it is given.
        width: the width in pixels.
        height: the height in pixels.

    Returns:
        An SVG document.
    """
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of matplotlib's font, in which nothing is shown
        figure = Figure((width / 72, height / 72), layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", metadata=_METADATA)
    # XML has no way to write control characters, nor half of a pair of surrogates.
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text.getvalue())


def stacked_bars(title: str, charts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Draws charts below each other, of bars whose parts share their length.

    Args:
        title: the text above them.
        charts: the value of each part by its name, by the name of its bar, by the title of its chart.
    """

    def draw(figure: Any) -> None:
        figure.suptitle(shorten_middle(title, LINE), x=0.01, ha="left", fontweight="bold", fontsize=9.0)
        heights = [len(bars) + 1 for bars in charts.values()]
        parts_of = figure.subplots(len(charts), height_ratios=heights, squeeze=False)[:, 0]
        for axes, (above, bars) in zip(parts_of, charts.items(), strict=True):
            axes.set_title(above, loc="left")
            axes.set_yticks(range(len(bars)), [shorten_middle(name, _NAME) for name in bars])
            axes.set_xticks([])
            starts = np.zeros(len(bars))
            for part, colour in colours_of([part for parts in bars.values() for part in parts]).items():
                values = [parts.get(part, 0.0) for parts in bars.values()]
                axes.barh(range(len(bars)), values, left=starts, color=colour, label=part)
                starts += values
            axes.invert_yaxis()
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.0), ncols=4, frameon=False)

    return svg(draw, 800, 60 + sum(90 + 28 * len(bars) for bars in charts.values()))


def difference_picture(
    curves: Mapping[str, Sequence[Sequence[float]]], reference: str, *, x_title: str, y_title: str, first: int = 1
) -> str:
    """Draws, for each precision, the mean over the seeds of its curve less the reference's of the same seed.

    A grey band shows how far the reference's own seeds lie from their mean: a line inside it is within seed noise.

    Args:
        curves: a curve a seed, all of one length, by precision; what is not finite ends its line.
        reference: the precision that the others are compared with.
        x_title: the name of what curves go over, such as "step".
        y_title: the name of the differences.
        first: x of the first point.
    """
    base = np.asarray(curves[reference], "float64")
    apart = base - base.mean(0)
    low, high = apart.min(0), apart.max(0)
    with np.errstate(invalid="ignore"):
        lines = {name: (np.asarray(seeds) - base).mean(0) for name, seeds in curves.items() if name != reference}
    below = f"0 is {reference}"
    if len(base) > 1:
        below += f"; grey: how far its own {len(base)} seeds lie from their mean"

    def draw(figure: Any) -> None:
        steps = range(first, first + base.shape[1])
        axes = figure.add_subplot()
        axes.set_title(shorten_middle(y_title, LINE), loc="left", fontweight="bold")
        axes.set_xlabel(f"{x_title}\n{below}")
        if len(base) > 1:
            axes.fill_between(steps, low, high, color=OTHER, alpha=BAND, linewidth=0, gid="band")
        axes.axhline(0.0, color=OTHER, linewidth=0.8)
        for name, colour in colours_of(list(lines)).items():
            line = np.where(np.isfinite(lines[name]), lines[name], np.nan)
            axes.plot(steps, line, color=colour, label=name, gid=name)
        axes.set_ylim(_limits(low, high, lines))
        axes.legend(loc="best", frameon=False)

    return svg(draw, 760, 440)


def _limits(low: np.ndarray, high: np.ndarray, lines: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """The lower and upper edge without the band's extremes."""
    band = np.concatenate([low, high])
    band = band[np.isfinite(band)]
    ends = [0.0, *(np.quantile(band, [0.05, 0.95]) if band.size else [])]
    ends += [float(value) for line in lines.values() for value in line if np.isfinite(value)]
    room = 0.05 * (max(ends) - min(ends)) or 1.0
    return min(ends) - room, max(ends) + room
