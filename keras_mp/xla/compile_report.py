"""The report of `inspect`: a compiled step that can be printed and written as JSON, HTML or SVG."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from keras_mp.reporting.report import PicturedReport, plain_values
from keras_mp.xla import compile_html, compile_table
from keras_mp.xla.compiled_step import CheckError as CheckError
from keras_mp.xla.compiled_step import CompiledStep


class CompileReport(CompiledStep, PicturedReport):
    """The result of compiling one step of a model for a chip; the attributes are those of `CompiledStep`.

    The picture has memory and operations by dtype, a bar for each precision.
    """

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        return plain_values(self)

    def _html(self) -> str:
        return compile_html.page(self)

    def _svg(self) -> str:
        return compile_html.picture(self)

    def __rich__(self) -> Group:
        return compile_table.render(self)
