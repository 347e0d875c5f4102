"""The report of `audit`: what it saw of each layer, that can be printed and written as JSON, HTML or SVG."""

from __future__ import annotations

from rich.console import Group

from keras_mp.numerics import audit_html, audit_table
from keras_mp.numerics.layer_audit import LayerAudits
from keras_mp.reporting.report import PicturedReport


class AuditReport(LayerAudits, PicturedReport):
    """The result of `audit`; the attributes are those of `LayerAudits`.

    The picture has layers down, formats across, colour by damage, forward beside backward.
    """

    def _html(self) -> str:
        return audit_html.page(self)

    def _svg(self) -> str:
        return audit_html.picture(self)

    def __rich__(self) -> Group:
        return audit_table.render(self)
