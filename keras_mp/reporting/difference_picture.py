"""The same training in several precisions as a picture: how far each is from a reference, and how far its seeds are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keras_mp.reporting.svg import FRAME, Axes, Picture, colours_of

_BAND = 0.22  # how much of the ground the band of the seeds covers


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
        x_title: what curves go over, such as "step".
        y_title: of the differences.
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
