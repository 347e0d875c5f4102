"""A result of peers.py as a picture: the kit in one colour, its peers in another, the ratio of the times in words."""

import re
from pathlib import Path

from results import read

from keras_mp.reporting.pictures import Bar, as_long, bar_chart
from keras_mp.system.atomic_write import write_text


def draw(path: Path) -> Path:
    """Draws a result, and writes it beside its file.

    Args:
        path: of the JSON file.

    Returns:
        The path of the SVG file.
    """
    result = read(path)
    base = result["rows"][0][0]
    title = f"{result['title'].partition(': ')[2]}; {result['columns'][0]}; {result['machine']}"
    below = f"Time of a step compared with {base}; the line is the middle half of the rounds"
    return write_text(bar_chart(title, below, [_bar(row, base) for row in result["rows"]]), path.with_suffix(".svg"))


def _bar(row: list[str], base: str) -> Bar:
    name, step, of_base = row[:3]
    kit = name.startswith("keras_mp")
    if not of_base:
        return Bar(name, None, 0.0, 0.0, step, kit)
    ratio, low, high = map(float, re.findall(r"\d+\.\d+", of_base))
    return Bar(name, ratio, low, high, f"{step} ms" + (f", {as_long(ratio)}" if name != base else ""), kit)
