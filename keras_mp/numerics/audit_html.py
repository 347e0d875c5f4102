"""An audit as one HTML file, and its picture: layers down, formats across, colour by damage."""

from __future__ import annotations

import math
from html import escape

from keras_mp.numerics.audit_table import headline, share, span
from keras_mp.numerics.layer_audit import LayerAudits
from keras_mp.precision.formats import FORMATS
from keras_mp.reporting.html import document, table

# From no damage to all of it, light to dark, so that it reads in grey too; an overflow is black.
_LIGHT, _DARK, _OVERFLOW, _ABSENT = (255, 247, 236), (153, 0, 13), "#000000", "#f3f4f6"
_LEAST, _MOST = -7.0, 0.0
_ROW, _CELL, _NAME = 14, 62, 330


def page(report: LayerAudits) -> str:
    """The page as text."""
    suspects = report.suspects()
    parts = [
        f"<h1>Audit of {escape(report.model)}</h1>",
        f"<p>{escape(headline(report))}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        "<h2>Suspects for float16, the first first</h2>",
        table(
            ("layer", "tensor", "why", "remedy"),
            ((suspect.path, suspect.tensor, suspect.reason, suspect.remedy) for suspect in suspects),
        )
        if suspects
        else "<p>None.</p>",
        "<h2>What each format would lose</h2>",
        picture(report),
        "<h2>Tensors</h2>",
        _tensors(report),
    ]
    return document(f"Audit of {report.model}", parts)


def picture(report: LayerAudits) -> str:
    """The picture as SVG."""
    formats = list(FORMATS)
    top, gap = 62, 16
    right = _NAME + len(formats) * _CELL + gap
    height, width = top + _ROW * len(report.layers) + 10, right + len(formats) * _CELL + 10
    drawn = [
        _text(_NAME, 14, "forward: change, as a share of the loss", bold=True),
        _text(right, 14, "backward: error of the gradients", bold=True),
    ]
    for start in (_NAME, right):
        drawn += [_text(start + place * _CELL + 3, top - 6, name) for place, name in enumerate(formats)]
    for place, (value, word) in enumerate(((1e-7, "1e-7"), (1e-4, "1e-4"), (1e-1, "0.1"), (math.inf, "overflow"))):
        x = _NAME + place * 80
        drawn.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{_colour(value)}"/>')
        drawn.append(_text(x + 16, 34, word))
    for index, layer in enumerate(report.layers):
        y = top + index * _ROW
        drawn.append(_text(_NAME - 6, y + 11, layer.path[-52:], end=True))
        backward = "output gradient" in layer.ranges or "kernel gradient" in layer.ranges
        for start, values, there in ((_NAME, layer.damage, True), (right, layer.gradient_error, backward)):
            for place, name in enumerate(formats):
                title = f"{layer.path}, {name}: {share(values[name])}" if there else f"{layer.path} has no gradient"
                fill = _colour(values[name]) if there else _ABSENT
                drawn.append(
                    f'<rect x="{start + place * _CELL}" y="{y}" width="{_CELL - 2}" height="{_ROW - 1}" fill="{fill}">'
                    f"<title>{escape(title)}</title></rect>"
                )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="system-ui, sans-serif" font-size="11"'
    background = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">{background}{"".join(drawn)}</svg>\n'


def _colour(value: float) -> str:
    if math.isinf(value):
        return _OVERFLOW
    depth = (math.log10(value) - _LEAST) / (_MOST - _LEAST) if value > 0 else 0.0
    depth = min(max(depth, 0.0), 1.0)
    mixed = (round(light + depth * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _text(x: float, y: float, words: str, *, end: bool = False, bold: bool = False) -> str:
    extra = (' text-anchor="end"' if end else "") + (' font-weight="bold"' if bold else "")
    return f'<text x="{x}" y="{y}"{extra}>{escape(words)}</text>'


def _tensors(report: LayerAudits) -> str:
    rows = []
    for layer in report.layers:
        for role, values in layer.ranges.items():
            losses = [values.loss(name) for name in FORMATS]
            half = losses[0]
            shares = [f"{lost:.2g}" for lost in (half.overflow, half.zeroed, half.subnormal)]
            decibels = ["" if math.isnan(loss.sqnr) else f"{loss.sqnr:.1f}" for loss in losses]
            rows.append([layer.path, role, span(values), f"{values.smallest:.2g}", *shares, *decibels])
    names = ("layer", "tensor", "range", "smallest", "overflow in float16", "zeroed", "subnormal")
    return table((*names, *(f"{name}, dB" for name in FORMATS)), rows, numbers=range(3, 7 + len(FORMATS)))
