"""The report of `inspect`: a compiled step that can be printed and written as HTML or SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras_mp.reporting.html import write_text
from keras_mp.xla.compiled_step import CheckError as CheckError
from keras_mp.xla.compiled_step import CompiledStep


class CompileReport(CompiledStep):
    """What the compiler of a chip made of one step of a model; the attributes are those of `CompiledStep`."""

    def to_html(self, path: str | Path) -> Path:
        """Writes the report as one HTML file, pictures inside.

        Args:
            path: the file; an existing one is replaced.

        Returns:
            The path.
        """
        from keras_mp.xla.html import write

        return write(self, Path(path))

    def to_svg(self, path: str | Path) -> Path:
        """Writes the picture: memory and operations by dtype, a bar for each precision; and returns the path."""
        from keras_mp.xla.html import picture

        return write_text(picture(self), Path(path))

    def __rich__(self) -> Any:
        from keras_mp.xla.table import render

        return render(self)

    def __str__(self) -> str:
        from keras_mp.xla.table import text

        return text(self)
