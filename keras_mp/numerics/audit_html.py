"""An audit as one HTML file, and its picture: layers down, formats across, colour by damage."""

from __future__ import annotations

import math
from html import escape

from keras_mp.numerics.audit_table import headline, share, span
from keras_mp.numerics.layer_audit import LayerAudits
from keras_mp.precision.formats import FORMATS
from keras_mp.reporting.html import document, table
from keras_mp.reporting.svg import Picture

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
        picture(report, inside_html=True),
        "<h2>Tensors</h2>",
        _tensors(report),
    ]
    return document(f"Audit of {report.model}", parts)


def picture(report: LayerAudits, *, inside_html: bool = False) -> str:
    """The picture as SVG."""
    formats = list(FORMATS)
    top, right = 62, _NAME + len(formats) * _CELL + 16
    drawing = Picture(right + len(formats) * _CELL + 10, top + _ROW * len(report.layers) + 10, font_size=11)
    drawing.text(_NAME, 14, "forward: change, as a share of the loss", bold=True)
    drawing.text(right, 14, "backward: error of the gradients", bold=True)
    damages = {"1e-7": 1e-7, "1e-4": 1e-4, "0.1": 1e-1, "overflow": math.inf}
    colours = {words: _colour(damage) for words, damage in damages.items()}
    drawing.legend(_NAME, 34, colours, columns=len(colours), spacing=80)
    for start in (_NAME, right):
        for place, name in enumerate(formats):
            drawing.text(start + place * _CELL + 3, top - 6, name)
    for index, audited in enumerate(report.layers):
        y = top + index * _ROW
        drawing.text(_NAME - 6, y + 11, audited.path, anchor="end", room=_NAME - 12)
        has_gradient = "output gradient" in audited.ranges or "kernel gradient" in audited.ranges
        _cells(drawing, _NAME, y, audited.path, audited.damage)
        _cells(drawing, right, y, audited.path, audited.gradient_error if has_gradient else None)
    return drawing.svg(inside_html=inside_html)


def _cells(drawing: Picture, x: float, y: float, path: str, damages: dict[str, float] | None) -> None:
    """Draws a cell for each format; grey ones where the layer has no gradient."""
    for place, name in enumerate(FORMATS):
        title = f"{path} has no gradient" if damages is None else f"{path}, {name}: {share(damages[name])}"
        fill = _ABSENT if damages is None else _colour(damages[name])
        drawing.rectangle(x + place * _CELL, y, _CELL - 2, _ROW - 1, fill, title)


def _colour(value: float) -> str:
    if math.isinf(value):
        return _OVERFLOW
    depth = (math.log10(value) - _LEAST) / (_MOST - _LEAST) if value > 0 else 0.0
    depth = min(max(depth, 0.0), 1.0)
    mixed = (round(light + depth * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


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
