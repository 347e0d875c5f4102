"""An audit as one HTML file, and its picture: layers down, precisions across, colour by verdict."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from keras_mp.numerics.audit_table import headline, share, span, verdict_lines
from keras_mp.numerics.layer_audit import LayerAudit, LayerAudits
from keras_mp.numerics.verdict import LEAST_SQNR, LEAST_SQNR_E4M3, LEAST_SQNR_E5M2
from keras_mp.precision.formats import FORMATS
from keras_mp.reporting.html import document, scrolling, table
from keras_mp.reporting.svg import INK, Picture


class _Column(NamedTuple):
    """A precision, and the formats that it rounds to, forward and backward."""

    precision: str
    name: str
    forward: str
    backward: str


_COLUMNS = (
    _Column("mixed_float16", "float16", "float16", "float16"),
    _Column("mixed_bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    _Column("fp8", "FP8", "E4M3", "E5M2"),
)
# What a cell says, its colour and how much of it covers the ground, which is light or dark: pale where a layer fits.
_FITS, _SCALED, _UNFIT, _OVERFLOW = "fits", "fits with the loss scale", "does not fit", "overflows"
_ABSENT = "no gradient, or not computed in FP8"
_STATES = {
    _FITS: ("#0072b2", 0.16),
    _SCALED: ("#e69f00", 0.4),
    _UNFIT: ("#d55e00", 0.7),
    _OVERFLOW: ("#b30000", 1.0),
    _ABSENT: ("#999999", 0.12),
}
_ROW, _CELL, _NAME = 17, 78, 300
_RULE = (
    f"A layer fits float16 if nothing overflows and its output and its gradients keep {LEAST_SQNR:.0f} dB, which is an "
    "error of a tenth; it fits bfloat16 if nothing overflows; it fits FP8 if its input and its weights keep "
    f"{LEAST_SQNR_E4M3:.0f} dB in E4M3 and its gradient {LEAST_SQNR_E5M2:.0f} dB in E5M2."
)
_CELLS = (
    "Left, the forward pass: the change of the loss, as a share of the loss, if the layer's output and weights (in FP8 "
    "its input and weights) are rounded; an estimate to first order. Right, the backward pass: the error of its "
    "gradients, as a share of their size. 1.0e-03 is a thousandth."
)
_WORDS = (
    ("dB", "decibels, the size of a tensor relative to the error of rounding it: at 20 dB the error is a tenth of the "
           "tensor, at 40 dB a hundredth, at 60 dB a thousandth."),
    ("overflow", "the share of the values that are larger than the largest number of the format (65504 in float16) and "
                 "become infinite."),
    ("zeroed", "the share of the values that are not zero and become zero, because they are smaller than the smallest "
               "number of the format (6e-8 in float16)."),
    ("subnormal", "the share of the values that are so small (below 6.1e-5 in float16) that the format keeps them with "
                  "fewer bits, and so less exactly."),
)  # fmt: skip


def page(report: LayerAudits) -> str:
    """The page as text."""
    parts = [
        f"<h1>Audit of {escape(report.model)}</h1>",
        f"<p>{escape(headline(report))}</p>",
        "<h2>Verdicts</h2>",
        table(("format", "verdict"), [line.split(": ", 1) for line in verdict_lines(report)]),
        f"<p>{escape(_RULE)}</p>",
        *(part for column in _COLUMNS for part in _suspects(report, column)),
        "<h2>Layer by layer</h2>",
        f"<p>{escape(_CELLS)}</p>",
        scrolling(picture(report, inside_html=True)),
        "<h2>Tensors</h2>",
        f"<ul>{''.join(f'<li><em>{word}</em>: {escape(meaning)}</li>' for word, meaning in _WORDS)}</ul>",
        "<p>Gradients are measured times the loss scale in float16, and FP8 tensors times a scale of their own.</p>",
        _tensors(report),
        "<h2>Notes</h2>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
    ]
    return document(f"Audit of {report.model}", parts)


def _suspects(report: LayerAudits, column: _Column) -> list[str]:
    suspects = report.suspects(column.precision)
    if not suspects:
        return []
    rows = ((s.path, "yes" if s.safe else "no", s.tensor, s.reason, s.remedy) for s in suspects)
    names = ("layer", "fits with the loss scale", "tensor", "why", "remedy")
    return [f"<h2>Layers to watch in {column.name}, the worst at the top</h2>", table(names, rows)]


def picture(report: LayerAudits, *, inside_html: bool = False) -> str:
    """The picture as SVG."""
    right = _NAME + len(_COLUMNS) * _CELL + 16
    drawing = Picture(right + len(_COLUMNS) * _CELL + 10, font_size=11)
    y = 20.0
    if not inside_html:  # where they stand above
        for line in verdict_lines(report):
            drawing.text(10, y, f"{report.model}, {line}", bold=True, room=drawing.width - 20)
            y += 18
        y += 8
    y = _legend(drawing, y)
    drawing.text(_NAME, y, "forward: change of the loss", bold=True)
    drawing.text(right, y, "backward: error of the gradients", bold=True)
    for place, column in enumerate(_COLUMNS):
        for start, rounded_to in ((_NAME, column.forward), (right, column.backward)):
            name = f"{column.name} {rounded_to}" if rounded_to != column.name else column.name
            drawing.text(start + (place + 1) * _CELL - 8, y + 20, name, anchor="end")
    y += 26
    for audited in report.layers:
        drawing.text(_NAME - 8, y + 12, audited.path, anchor="end", room=_NAME - 16)
        for place, column in enumerate(_COLUMNS):
            _cell(drawing, _NAME + place * _CELL, y, audited, column, forward=True)
            _cell(drawing, right + place * _CELL, y, audited, column, forward=False)
        y += _ROW
    drawing.height = y + 10
    return drawing.svg(inside_html=inside_html)


def _legend(drawing: Picture, y: float) -> float:
    for place, (state, (colour, opacity)) in enumerate(_STATES.items()):
        x, down = 10 + 190 * (place % 4), 20 * (place // 4)
        drawing.rectangle(x, y + down - 11, 14, 14, colour, opacity=opacity)
        drawing.text(x + 20, y + down, state)
    return y + 20 * -(-len(_STATES) // 4) + 12


def _cell(drawing: Picture, x: float, y: float, audited: LayerAudit, column: _Column, *, forward: bool) -> None:
    figure = _figure(audited, column, forward)
    state = _state(audited, column, forward, figure)
    colour, opacity = _STATES[state]
    reason = audited.verdicts[column.precision].reason
    title = f"{audited.path}, {column.name}: {state}" + (f": {reason}" if state not in (_FITS, _ABSENT) else "")
    drawing.rectangle(x, y, _CELL - 2, _ROW - 1, colour, title, opacity=opacity)
    if state != _ABSENT:
        fill = {_OVERFLOW: "#ffffff", _UNFIT: INK}.get(state, "")
        drawing.text(x + _CELL - 8, y + 12, share(figure), anchor="end", fill=fill)


def _figure(audited: LayerAudit, column: _Column, forward: bool) -> float:
    if not forward:
        return audited.gradient_error[column.backward]
    return (audited.input_damage if column.precision == "fp8" else audited.damage)[column.forward]


def _state(audited: LayerAudit, column: _Column, forward: bool, figure: float) -> str:
    judged = audited.verdicts[column.precision]
    has_gradient = "output gradient" in audited.ranges or "kernel gradient" in audited.ranges
    if not forward and not has_gradient or column.precision == "fp8" and not judged.ok and not judged.tensor:
        return _ABSENT
    if not judged.tensor or forward == ("gradient" in judged.tensor):
        return _FITS
    if judged.ok:
        return _SCALED if judged.remedy else _FITS
    return _OVERFLOW if math.isinf(figure) else _UNFIT


def _tensors(report: LayerAudits) -> str:
    rows = []
    for layer in report.layers:
        for role, values in layer.ranges.items():
            losses = [values.loss(name) for name in FORMATS]
            half = losses[0]
            shares = [f"{lost:.2g}" for lost in (half.overflow, half.zeroed, half.subnormal)]
            decibels = ["" if math.isnan(loss.sqnr) else f"{loss.sqnr:.1f}" for loss in losses]
            rows.append([layer.path, role, span(values), f"{values.smallest:.2g}", *decibels, *shares])
    lost = (f"{word} in float16" for word in ("overflow", "zeroed", "subnormal"))
    names = ("layer", "tensor", "range", "smallest", *(f"dB in {name}" for name in FORMATS), *lost)
    return table(names, rows, numbers=range(2, len(names)))
