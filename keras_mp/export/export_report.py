"""The reports of the exports: that they can be printed and written as JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from keras_mp.export import export_html
from keras_mp.reporting.plain_values import plain_values
from keras_mp.reporting.report import Report


class ExportedSavedModel(NamedTuple):
    """The fields of `ExportReport`.

    Attributes:
        path: the SavedModel's folder.
        nodes: how many graph nodes were looked at, over all functions.
        low_precision_ops: how many of them compute, hold or pass on a 16- or 8-bit float: 0, or there is no report.
        max_difference: largest difference between the loaded SavedModel and the model run in float32, divided by
            max(1, the largest magnitude of that output); None without `verify`.
        precision_gap: the same between the model as it was (in its own precision) and the SavedModel: what the low
            precision cost on this batch; None without `verify`, or where the model cannot be run as it was: a CPU has
            no float16 kernel for some layers.
        notes: sentences on what could not be run or compared, and why.
    """

    path: Path
    nodes: int
    low_precision_ops: int
    max_difference: float | None = None
    precision_gap: float | None = None
    notes: tuple[str, ...] = ()


class ExportReport(ExportedSavedModel, Report):
    """What `export_float32` wrote; the attributes are those of `ExportedSavedModel`."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        return plain_values(self)

    def _html(self) -> str:
        return export_html.page(self.to_dict())

    def __rich__(self) -> Text:
        text = f"{self.path}: {self.low_precision_ops} low-precision ops in {self.nodes} nodes"
        if self.max_difference is not None:
            text += f"; {self.max_difference:.1e} from the model in float32"
        if self.precision_gap is not None:
            text += f", {self.precision_gap:.1e} from the original"
        return Text("\n  ".join([text, *self.notes]))


class Int8Layer(NamedTuple):
    """What int8 does to the output of a layer.

    Attributes:
        path: the names that lead to the layer, joined with `/`.
        lowest: the lowest value on the calibration data.
        highest: the highest one.
        predicted: SQNR in dB that rounding this range to 8 bits alone would leave: `calibration.int8_sqnr`.
        file_lowest: the lowest value that the file's tensor can hold; None where the file has no such tensor, because
            the layer was fused with the next one.
        file_highest: the highest one.
        measured: SQNR in dB of the file's tensor against the layer's output in float32, all errors before it included;
            None as above.
    """

    path: str
    lowest: float
    highest: float
    predicted: float
    file_lowest: float | None = None
    file_highest: float | None = None
    measured: float | None = None

    @property
    def clipped(self) -> bool:
        """Whether the file's range ends more than one step of it inside the layer's."""
        if self.file_lowest is None or self.file_highest is None:
            return False
        step = (self.file_highest - self.file_lowest) / 255
        return self.lowest < self.file_lowest - step or self.highest > self.file_highest + step

    @property
    def times_too_wide(self) -> float:
        """The file's range divided by the layer's, zero included in both; 1 where the file has no such tensor."""
        if self.file_lowest is None or self.file_highest is None:
            return 1.0
        width = max(self.highest, 0.0) - min(self.lowest, 0.0)
        return (self.file_highest - self.file_lowest) / width if width else 1.0

    def line(self) -> str:
        """What was measured, in a line."""
        text = f"{self.path}: {self.measured:.1f} dB of {self.predicted:.1f} predicted"
        text += ", clipped" if self.clipped else ""
        return text + (f", range {self.times_too_wide:.1f} times too wide" if self.times_too_wide > 2 else "")


class ExportedFile(NamedTuple):
    """The fields of `DeploymentReport`.

    Attributes:
        path: the file.
        format: "ONNX", "LiteRT" or "LiteRT int8".
        bytes: the size of the file.
        operators: how many there are of each kind.
        low_precision: how many tensors hold a 16- or 8-bit float: 0, or there is no report.
        max_difference: largest difference between what the file gives in its runtime and the model run in float32,
            divided by max(1, the largest magnitude of that output); None without `verify`.
        precision_gap: the same between the model as it was, in its own precision, and the file; None without `verify`,
            or where the model cannot be run as it was.
        float_operators: of an int8 file, those that compute in float32 all the same, by kind.
        calibrated_on: of an int8 file, how many records set the ranges.
        layers: of an int8 file, what it does to each layer's output.
        notes: sentences on what could not be run or compared, and why.
    """

    path: Path
    format: str
    bytes: int
    operators: dict[str, int]
    low_precision: int = 0
    max_difference: float | None = None
    precision_gap: float | None = None
    float_operators: dict[str, int] = {}
    calibrated_on: int = 0
    layers: tuple[Int8Layer, ...] = ()
    notes: tuple[str, ...] = ()


class DeploymentReport(ExportedFile, Report):
    """What `export_onnx` or `export_litert` wrote; the attributes are those of `ExportedFile`."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        return plain_values(self)

    def _html(self) -> str:
        return export_html.page(self.to_dict())

    def __rich__(self) -> Text:
        text = f"{self.path}: {self.format}, {self.bytes:,} bytes, {sum(self.operators.values())} operators, "
        text += f"{self.low_precision} low-precision tensors"
        if self.max_difference is not None:
            text += f"; {self.max_difference:.1e} from the model in float32"
        if self.precision_gap is not None:
            text += f", {self.precision_gap:.1e} from the original"
        lines = [text, *(f"  {note}" for note in self.notes)]
        return Text("\n".join(lines + self._int8_lines() if self.format == "LiteRT int8" else lines))

    def _int8_lines(self) -> list[str]:
        kinds = ", ".join(f"{count} {name}" for name, count in self.float_operators.items())
        stay = f"{sum(self.float_operators.values())} operators stay in float32{': ' + kinds if kinds else ''}"
        measured = [layer for layer in self.layers if layer.measured is not None]
        worst = sorted(measured, key=lambda layer: layer.measured or 0.0)[:3]
        return [f"{stay}; ranges of {self.calibrated_on} records", *(f"  {layer.line()}" for layer in worst)]
