"""The report of `advise`: a row for each chip, that can be printed and written as JSON or HTML."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from keras_mp.advice import advice_html, advice_table
from keras_mp.advice.advised import Advised
from keras_mp.reporting.report import Report, plain_values


class AdviceReport(Advised, Report):
    """The result of `advise`; the attributes are those of `Advised`."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        values = plain_values(self)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain |= {"verdict": row.verdict, "missing": row.missing}
        return values

    def _html(self) -> str:
        return advice_html.page(self)

    def __rich__(self) -> Group:
        return advice_table.render(self)
