"""A policy search as one HTML file."""

from __future__ import annotations

from html import escape
from typing import Any

from keras_mp.reporting.html import document, table


def page(search: dict[str, Any]) -> str:
    """The page as text.

    Args:
        search: `PolicySearch.to_dict()`.
    """
    precisions = [(path, search["base"]) for path in search["layers"] if path not in search["restored"]]
    tried = [_trial(index, trial) for index, trial in enumerate(search["tried"], 1)]
    parts = [
        "<h1>Precision of each layer</h1>",
        f"<p>{escape(search['message'])}</p>",
        f"<p>Tolerance {search['tolerance']:g}; initial loss scale for float16 {search['loss_scale']:g}.</p>",
        "<h2>Operations</h2>",
        table(("precision", "share"), [(name, f"{share:.1%}") for name, share in search["work"].items()], numbers=(1,)),
        "<h2>Layers</h2>",
        table(("layer", "precision"), [*search["restored"].items(), *precisions]),
        "<h2>Layers in FP8</h2>",
        table(("layer",), [(path,) for path in search["fp8_layers"]]) if search["fp8_layers"] else "<p>None.</p>",
        "<h2>Mixes tried</h2>",
        table(
            ("mix", "in FP8", "restored", "error of the loss", "of the gradients", "passed"), tried, numbers=range(5)
        ),
    ]
    return document("Precision of each layer", parts)


def _trial(number: int, trial: dict[str, Any]) -> tuple[str, ...]:
    errors = (f"{float(trial[name]):.3g}" for name in ("loss_error", "gradient_error"))
    return (str(number), str(trial["fp8"]), str(len(trial["restored"])), *errors, "yes" if trial["passed"] else "no")
