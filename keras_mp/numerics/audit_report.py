"""The report of `audit`: what it saw of each layer, that can be printed and written as HTML or SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras_mp.numerics.layer_audit import LayerAudits
from keras_mp.reporting.html import write_text


class AuditReport(LayerAudits):
    """What `audit` found; the attributes are those of `LayerAudits`."""

    def to_html(self, path: str | Path) -> Path:
        """Writes the report as one HTML file, with its picture inside, and returns the path."""
        from keras_mp.numerics import audit_html

        return audit_html.write(self, Path(path))

    def to_svg(self, path: str | Path) -> Path:
        """Writes the picture: layers down, formats across, colour by damage, forward beside backward."""
        from keras_mp.numerics import audit_html

        return write_text(audit_html.picture(self), Path(path))

    def __str__(self) -> str:
        from keras_mp.numerics import audit_table

        return audit_table.text(self)

    def __rich__(self) -> Any:
        from keras_mp.numerics import audit_table

        return audit_table.render(self)
