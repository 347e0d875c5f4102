"""Methods of every report: text, tables, JSON, HTML."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Group, RenderableType

from keras_mp.reporting.answer import COLUMNS, LINES, Details, Sentence, fitting, html
from keras_mp.reporting.html import document, folded
from keras_mp.reporting.table import plain_text
from keras_mp.system.atomic_write import write_text


class Report(ABC):
    """A result to print, or write as JSON or HTML.

    `print(report)` writes the answer, on at most 25 lines of 80 columns; `print(report.details())` the tables behind
    it, of 120 columns. `rich.print` adapts both to the width of the terminal.
    """

    in_the_shell: ClassVar[bool] = False  # whether a command prints it, whose option --details prints the tables

    def details(self, *names: str) -> Details:
        """The tables behind the answer, to print.

        Args:
            names: the names of the tables that are wanted; the last line of the printed report lists them. By default
                all.

        Raises:
            ValueError: the report has no such table.
        """
        tables = self._tables()
        for name in names:
            if name not in tables:
                raise ValueError(f"{name!r} is not a table of this report. Its tables: {', '.join(tables) or 'none'}")
        return Details(table for name in names or tables for table in tables[name])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values, as JSON has them."""
        return plain_values(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the report as JSON, also written to a path.

        Args:
            path: the file; an existing one is replaced, and missing folders are made.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_text(text + "\n", Path(path))
        return text

    def to_html(self, path: str | Path) -> Path:
        """Writes the report as one HTML file.

        Args:
            path: the file; an existing one is replaced, and missing folders are made.

        Returns:
            The path.
        """
        tables = (folded(name.capitalize(), "".join(map(html, parts))) for name, parts in self._tables().items())
        said = (sentence.html() for sentence in self._answer())
        page = document(self._title(), [f"<h1>{escape(self._title())}</h1>", *said, *tables])
        return write_text(page, Path(path))

    def _title(self) -> str:
        """The title of the page."""
        return type(self).__name__

    @abstractmethod
    def _answer(self) -> Sequence[Sentence]:
        """What is said first, the verdict before all else."""

    def _tables(self) -> Mapping[str, Sequence[RenderableType]]:
        """The tables behind the answer, by name for `details`."""
        return {}

    def __rich__(self) -> Group:
        names = ", ".join(map(repr, self._tables()))
        shell = "; --details in the shell" if self.in_the_shell else ""
        more = [Sentence("More", f"report.details(), or of these {names}{shell}.")] if names else []
        room = LINES - sum(sentence.lines for sentence in more)
        return Group(*fitting(self._answer(), room), *more)

    def __str__(self) -> str:
        return plain_text(self.__rich__(), COLUMNS)


def plain_values(value: Any) -> Any:
    """Converts a value into what JSON can hold.

    Dataclasses and named tuples become dicts, other sequences lists, paths strings, NumPy's numbers Python's, and
    numbers that are not finite the strings "inf", "-inf" and "nan".

    Raises:
        TypeError: there is a value of another type in it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain_values(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_values(item) for item in value]
    raise TypeError(f"value={value!r} of type {type(value).__name__} cannot be written as JSON")
