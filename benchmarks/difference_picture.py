"""The picture of trainings in several precisions, as differences from one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_mp.reporting.html import colours_of
from keras_mp.reporting.pictures import LINE, OTHER, svg
from keras_mp.reporting.text import shorten_middle

BAND = 0.22  # how much of the ground the band of the seeds covers


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
