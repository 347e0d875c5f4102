"""Pictures of reports as SVG, drawn by matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_mp.reporting.html import colours_of
from keras_mp.reporting.text import shorten_middle
from keras_mp.system.packages import install_command

OTHER = "#999999"
_NAME, LINE = 44, 110  # characters
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


def svg(draw: Callable[[Any], None], width: float, height: float) -> str:
    """Draws a picture.

    Args:
        draw: a function that draws into the `matplotlib.figure.Figure` that it is given.
        width: the width in pixels.
        height: the height in pixels.

    Returns:
        An SVG document.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"matplotlib draws the picture, and is not installed: {install_command('plots')}") from error
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
