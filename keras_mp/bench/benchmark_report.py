"""The report of a benchmark."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from keras_mp.bench.workloads import Measured, Spread, quartiles, ratio
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable

_COLUMNS = ("", "step, ms", "time, of the base's", "a second", "compile, s", "MiB", "batch")


@dataclass
class BenchmarkReport(Report):
    """The result of `keras_mp.bench.benchmark`.

    Attributes:
        title: the thing that was measured, and the machine.
        base: the name of the row that ratios are to.
        rows: the measurements, a row a precision; one that could not run says why.
    """

    in_the_shell = True

    title: str
    base: str
    rows: list[Measured]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages in the processes that ran."""
        return {name: text for row in self.rows for name, text in row.details.get("versions", {}).items()}

    @property
    def problems(self) -> list[str]:
        """The reasons why rows hold nothing, a line each."""
        return [f"{row.name}: {row.problem}. {row.reason}" for row in self.rows if row.problem]

    @property
    def verdict(self) -> list[str]:
        """Sentences on the gain of each lower precision here."""
        return [text for row in self.rows if row.name != self.base and (text := self._verdict(row))]

    def row(self, name: str) -> Measured:
        """The row of a name.

        Raises:
            KeyError: If there is no row of that name; the message lists the names.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"there is no row {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def step(self, name: str) -> Spread | None:
        """Quartiles of a step's seconds; None if not run."""
        row = self.row(name)
        return quartiles(row.seconds) if row.seconds else None

    def ratio(self, name: str) -> Spread | None:
        """Time of a step as a multiple of the base's."""
        row, base = self.row(name), self.row(self.base)
        return ratio(row.seconds, base.seconds) if row.seconds and base.seconds else None

    def rate(self, name: str) -> float | None:
        """Samples or tokens a second, by the median step."""
        row, step = self.row(name), self.step(name)
        return row.details["units"] / step.median if step and "units" in row.details else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values, with every measurement."""
        rows = []
        for row in self.rows:
            measured = dataclasses.asdict(row)
            details = measured.pop("details")
            of_base = self.ratio(row.name)
            first = None if math.isnan(row.first) else row.first
            rows.append(plain_values(measured | {"first": first, "of_base": of_base and of_base.median} | details))
        return {"title": self.title, "base": self.base, "rows": rows}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns that hold something, and rows' cells."""
        rows = [self._cells(row) for row in self.rows]
        rate = next((row.details["unit"] for row in self.rows if "unit" in row.details), "steps")
        names = [f"{rate}/s" if name == "a second" else name for name in _COLUMNS]
        names[2] = f"time, of {self.base}'s"
        kept = [place for place, _ in enumerate(names) if place == 0 or any(cells[place] for cells in rows)]
        return [names[place] for place in kept], [[cells[place] for place in kept] for cells in rows]

    def _title(self) -> str:
        return self.title

    def _answer(self) -> list[Sentence]:
        names, rows = self.table()
        narrow = ColumnTable("", names[:4], names[:4], names[1:4], [cells[:4] for cells in rows])
        said = [Sentence("", self.title), *(Sentence("", text) for text in self.verdict)]
        said += [Sentence("Not measured", text) for text in self.problems]
        return [*said, Sentence("", "", below=narrow)]

    def _tables(self) -> dict[str, list[RenderableType]]:
        names, rows = self.table()
        table = ColumnTable(self.title, names, narrow=names[:4], right=names[1:], rows=rows)
        table.caption = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return {"measured": [table]}

    def _verdict(self, row: Measured) -> str:
        of_base = self.ratio(row.name)
        if of_base is None:
            return ""
        share = f"{abs(of_base.median - 1):.0%}"
        if of_base.high < 1:
            return f"{row.name} takes {share} less time than {self.base} here."
        why = row.details.get("why_not", "")
        because = f": {why}" if why else "."
        if of_base.low > 1:
            return f"{row.name} takes {share} more time than {self.base} here{because}"
        return f"{row.name} takes as much time as {self.base} here, within the spread of the rounds{because}"

    def _cells(self, row: Measured) -> list[str]:
        step = self.step(row.name)
        if step is None:
            return [row.name, row.problem, *[""] * (len(_COLUMNS) - 2)]
        of_base, rate = self.ratio(row.name), self.rate(row.name)
        return [
            row.name,
            f"{1e3 * step.median:.0f}" if step.median >= 0.1 else f"{1e3 * step.median:.3g}",
            f"{of_base.median:.2f} ({of_base.low:.2f}-{of_base.high:.2f})" if of_base else "",
            f"{rate:,.0f}" if rate else "",
            f"{max(0.0, row.first - step.median):.1f}",
            f"{row.peak / 2**20:,.0f}" if row.peak is not None else "",
            str(row.details.get("batch", "")),
        ]
