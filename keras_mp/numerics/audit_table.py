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
    """The report for rich: the layers, worst first, then what to worry about, and last the verdicts."""
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
    verdicts = (Text(line, style="bold") for line in verdict_lines(report))
    return Group(table, *notes, *parts, Text(headline(report)), *verdicts)


def headline(report: LayerAudits) -> str:
    """The run in a sentence."""
    return f"{report.model}: {report.steps} step{'s' if report.steps > 1 else ''} in float32, loss {report.loss:.4g}"


def verdict_lines(report: LayerAudits) -> list[str]:
    """The verdict on each format, a line: "float16: all 7 layers fit, at an initial loss scale of 16384"."""
    return [
        f"float16: {_fitting(report, 'mixed_float16')}, at an initial loss scale of {report.loss_scale:g}",
        f"bfloat16: {_fitting(report, 'mixed_bfloat16')}",
        f"FP8: {_fitting_fp8(report)}",
    ]


def _fitting(report: LayerAudits, precision: str) -> str:
    unfit = sum(not layer.verdicts[precision].ok for layer in report.layers)
    count = len(report.layers)
    return f"{unfit} of {count} layers {'does' if unfit == 1 else 'do'} not fit" if unfit else f"all {count} layers fit"


def _fitting_fp8(report: LayerAudits) -> str:
    verdicts = [layer.verdicts["fp8"] for layer in report.layers]
    candidates = [verdict for verdict in verdicts if verdict.ok or verdict.tensor]
    if not candidates and any("quantized" in verdict.reason for verdict in verdicts):
        return "the Dense and EinsumDense layers are quantized, and no other layer computes in FP8"
    if not candidates:
        return "there is no Dense or EinsumDense layer, and no other layer computes in FP8"
    fitting = sum(verdict.ok for verdict in candidates)
    if len(candidates) == 1:
        counted = f"the only Dense or EinsumDense layer {'fits' if fitting else 'does not fit'}"
    else:
        counted = f"{fitting} of {len(candidates)} Dense and EinsumDense layers fit"
    return f"{counted}; no other layer computes in FP8"


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
