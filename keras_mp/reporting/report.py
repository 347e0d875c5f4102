"""The methods that every report of the kit has."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from keras_mp.reporting.table import WIDE, plain_text
from keras_mp.system.atomic_write import write_text


class Report(ABC):
    """A result that can be printed, and written as JSON or HTML.

    `print(report)` writes plain text; `rich.print(report)` adapts tables to the width of the terminal.
    """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the report as JSON, and writes it to a file where a path is given.

        Args:
            path: the file; an existing one is replaced, and missing folders are made.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_text(text + "\n", Path(path))
        return text

    def to_html(self, path: str | Path) -> Path:
        """Writes the report as one HTML file, pictures inside.

        Args:
            path: the file; an existing one is replaced, and missing folders are made.

        Returns:
            The path.
        """
        return write_text(self._html(), Path(path))

    @abstractmethod
    def _html(self) -> str:
        """The page as text."""

    @abstractmethod
    def __rich__(self) -> RenderableType: ...

    def __str__(self) -> str:
        return plain_text(self.__rich__(), WIDE)


class PicturedReport(Report):
    """A report that has a picture."""

    def to_svg(self, path: str | Path) -> Path:
        """Writes the picture as an SVG file.

        Args:
            path: the file; an existing one is replaced, and missing folders are made.

        Returns:
            The path.
        """
        return write_text(self._svg(), Path(path))

    @abstractmethod
    def _svg(self) -> str:
        """The picture as text."""
