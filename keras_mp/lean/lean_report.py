"""The report of what is lean in a model, and why the rest is not."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any, NamedTuple

import keras
from rich.console import RenderableType

from keras_mp.lean.candidates import candidates
from keras_mp.reporting.html import document, table
from keras_mp.reporting.plain_values import plain_values
from keras_mp.reporting.report import Report
from keras_mp.reporting.table import ColumnTable

_COLUMNS = ("layer", "kind", "lean", "reason")


class LeanRow(NamedTuple):
    """A part of a model that keeps much for the backward pass.

    Attributes:
        layer: the names that lead to it, joined with `/`.
        kind: "attention", "gelu", "int4" (a product of int4 weights), "head" (a layer that makes logits over a
            vocabulary) or "block" (recomputed).
        lean: whether it is lean.
        reason: why it cannot be lean; empty where it is, or where `make_lean` would make it so.
    """

    layer: str
    kind: str
    lean: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class LeanReport(Report):
    """What is lean in a model; `lean_report` makes it.

    Attributes:
        name: of the model.
        rows: a `LeanRow` for each part, in the model's order.
    """

    name: str
    rows: tuple[LeanRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return plain_values(self)

    def _html(self) -> str:
        title = f"{self.name}: {self._summary()}"
        return document(title, [f"<h1>{escape(title)}</h1>", table(_COLUMNS, [_cells(row) for row in self.rows])])

    def __rich__(self) -> RenderableType:
        shown = ColumnTable(f"{self.name}: {self._summary()}", _COLUMNS, narrow=_COLUMNS)
        for row in self.rows:
            shown.add_row(*_cells(row))
        return shown

    def _summary(self) -> str:
        lean = sum(row.lean for row in self.rows)
        return f"{lean} of {len(self.rows)} parts are lean"


def lean_report(model: keras.Model) -> LeanReport:
    """Lists attention layers, GELUs, int4 products, vocabulary head and recomputed blocks: lean or not, and why.

    Args:
        model: a built Keras model, before or after `make_lean`, or loaded from a file.

    Returns:
        The report; `print` shows it as a table.
    """
    rows = tuple(LeanRow(part.path, part.kind, part.lean, part.reason) for part in candidates(model))
    return LeanReport(model.name, rows)


def _cells(row: LeanRow) -> tuple[str, ...]:
    return row.layer, row.kind, "yes" if row.lean else "no", row.reason
