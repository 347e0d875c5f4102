"""An export's report as one HTML file."""

from __future__ import annotations

from html import escape
from typing import Any

from keras_mp.reporting.html import document, table

_TITLES = {
    "path": "written to",
    "format": "format",
    "bytes": "bytes",
    "nodes": "graph nodes looked at",
    "low_precision_ops": "low-precision operations",
    "low_precision": "low-precision tensors",
    "max_difference": "largest difference from the model in float32",
    "precision_gap": "difference from the original in its own precision",
    "calibrated_on": "records of calibration",
}
_LAYER = ("path", "lowest", "highest", "file_lowest", "file_highest", "predicted", "measured")


def page(report: dict[str, Any]) -> str:
    """The page as text.

    Args:
        report: `ExportReport.to_dict()` or `DeploymentReport.to_dict()`.
    """
    facts = [(title, _written(report[name])) for name, title in _TITLES.items() if report.get(name) is not None]
    parts = ["<h1>Export</h1>", table(("", ""), facts)]
    for name, title in (("operators", "Operators"), ("float_operators", "Operators that stay in float32")):
        if report.get(name):
            rows = [(kind, str(count)) for kind, count in report[name].items()]
            parts += [f"<h2>{title}</h2>", table(("operator", "count"), rows, numbers=(1,))]
    if report.get("layers"):
        layers = [[_written(layer[name]) for name in _LAYER] for layer in report["layers"]]
        names = ("layer", "lowest", "highest", "file's lowest", "file's highest", "predicted, dB", "measured, dB")
        parts += ["<h2>Layers in int8</h2>", table(names, layers, numbers=range(1, len(names)))]
    parts += [f"<p>{escape(note)}</p>" for note in report["notes"]]
    return document(f"Export to {report['path']}", parts)


def _written(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
