"""An audit on the terminal."""

from __future__ import annotations

import math

from rich.console import Group
from rich.text import Text

from keras_mp.numerics.layer_audit import LayerAudit, LayerAudits
from keras_mp.numerics.ranges import Range
from keras_mp.reporting.table import ColumnTable

_ROWS = 40
_SUSPECTS = 12
COLUMNS = ("layer", "output", "kernel", "output gradient", "float16", "damage float16", "bfloat16", "E4M3")


def render(report: LayerAudits) -> Group:
    """The report for rich: the layers, worst first, then what to worry about, and last the verdict."""
    parts: list = []
    suspects = report.suspects()
    for suspect in suspects[:_SUSPECTS]:
        mark = "loss scale" if suspect.safe else "unsafe in float16"
        parts.append(Text(f"{mark}: {suspect.path}: {suspect.reason}; {suspect.remedy}."))
    if len(suspects) > _SUSPECTS:
        parts.append(Text(f"and {len(suspects) - _SUSPECTS} more"))
    left = ("layer", "float16")
    table = ColumnTable(
        "Layers, worst first: ranges, and damage to the loss as a share of it",
        COLUMNS,
        narrow=(*left, "damage float16", "bfloat16", "E4M3"),
        right=[name for name in COLUMNS if name not in left],
    )
    ordered = sorted(report.layers, key=lambda layer: -layer.damage["float16"])
    for layer in ordered[:_ROWS]:
        table.add_row(*row(layer))
    if len(ordered) > _ROWS:
        table.caption = f"and {len(ordered) - _ROWS} more: to_json() and to_html() have all"
    notes = [Text(f"Note: {note}") for note in report.notes]
    return Group(table, *notes, *parts, Text(headline(report), style="bold"))


def headline(report: LayerAudits) -> str:
    """The run and its verdict in a sentence."""
    suspects = [suspect for suspect in report.suspects() if not suspect.safe]
    count = len(report.layers)
    fits = (
        f"all {count} layers fit float16" if not suspects else f"{len(suspects)} of {count} layers do not fit float16"
    )
    return (
        f"{report.model}: {report.steps} step{'s' if report.steps > 1 else ''} in float32, loss {report.loss:.4g}; "
        f"{fits}, at an initial loss scale of {report.loss_scale:g}"
    )


def row(layer: LayerAudit) -> list[str]:
    """The cells of a layer, as in `COLUMNS`."""
    name = layer.path + (f" ({layer.calls} calls)" if layer.calls > 1 else "")
    judged = layer.verdicts["mixed_float16"]
    word = "yes" if judged.ok else f"no: {judged.tensor}"
    ranges = [span(layer.ranges.get(role)) for role in ("output", "kernel", "output gradient")]
    return [name, *ranges, word, *(share(layer.damage[name]) for name in ("float16", "bfloat16", "E4M3"))]


def span(values: Range | None) -> str:
    """The lowest and the highest value."""
    if values is None or not math.isfinite(values.lowest):
        return "-"
    return f"{values.lowest:.3g} to {values.highest:.3g}"


def share(damage: float) -> str:
    """A damage: `overflow` where it is infinite."""
    return "overflow" if math.isinf(damage) else f"{damage:.1e}"
