"""The reports of the exports: as values, on the terminal, as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType

from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report
from keras_mp.reporting.table import ColumnTable


@dataclass(frozen=True)
class ExportReport(Report):
    """The result of `export_float32`.

    Attributes:
        path: the SavedModel's folder.
        nodes: the number of graph nodes that were looked at, over all functions.
        low_precision_ops: the number of nodes that compute, hold or pass on a 16- or 8-bit float: 0, or there is no
            report.
        max_difference: the largest difference between the loaded SavedModel and the model run in float32, divided by
            max(1, the largest magnitude of that output); None without `verify`.
        precision_gap: the largest difference between the model in its own precision and the SavedModel,
            divided likewise: what the low precision cost on this batch; None without `verify`, or where the model
            cannot be run as it was: a CPU has no float16 kernel for some layers.
        notes: sentences on what could not be run or compared, and why.
    """

    path: Path
    nodes: int
    low_precision_ops: int
    max_difference: float | None = None
    precision_gap: float | None = None
    notes: tuple[str, ...] = ()

    def _title(self) -> str:
        return f"Export to {self.path}"

    def _answer(self) -> list[Sentence]:
        text = f"{self.path}: {self.low_precision_ops} of {self.nodes} nodes compute in 16 bits or fewer"
        text += f".{_differences(self)}"
        return [Sentence("", text), *(Sentence("Note", note) for note in self.notes)]


# In dB: an error of a tenth of a layer's output.
LOW_OUTPUT_SQNR = 20.0


class Int8Layer(NamedTuple):
    """What int8 or int16 does to a layer's output.

    Attributes:
        path: the names that lead to the layer, joined with `/`.
        lowest: the lowest value on the calibration data.
        highest: the highest value on the calibration data.
        predicted: SQNR in dB that rounding this range to integers alone would leave: `int8.integer_sqnr`.
        file_lowest: the lowest value that the file's tensor can hold; None where the file has no such tensor, because
            the layer was fused with the next one.
        file_highest: the highest value that the file's tensor can hold; None where the file has no such tensor.
        measured: SQNR in dB of the file's tensor against the layer's output in float32, all errors before it included;
            None where the file has no such tensor.
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
        text = f"{self.path} keeps a signal-to-noise ratio of {self.measured:.1f} dB, of {self.predicted:.1f} predicted"
        text += ", clipped" if self.clipped else ""
        return text + (f", range {self.times_too_wide:.1f} times too wide" if self.times_too_wide > 2.1 else "")


@dataclass(frozen=True)
class DeploymentReport(Report):
    """The result of `export_onnx` or `export_litert`.

    Attributes:
        path: the file.
        format: "ONNX", "LiteRT", "LiteRT int8" or "LiteRT int16x8".
        bytes: the size of the file.
        operators: the number of operators of each kind.
        low_precision: the number of tensors that hold a 16- or 8-bit float: 0, or there is no report.
        max_difference: the largest difference between what the file gives in its runtime and the model run in float32,
            divided by max(1, the largest magnitude of that output); None without `verify`.
        precision_gap: the largest difference between the model in its own precision and the file, divided
            likewise; None without `verify`, or where the model cannot be run as it was.
        float_operators: the number of operators of a quantized file that compute in float32 all the same, by kind.
        calibrated_on: the number of records that set the ranges of a quantized file.
        layers: the effect of quantization on each layer's output; empty where the file is in float32.
        notes: sentences on what could not be run or compared, and why.
        within_one_code: the part of a quantized file's output values that are at most one code from the model's, run in
            float32; None without `verify`.
        model_scores: the loss and the metrics of the model on the data of `evaluate`; empty without it.
        file_scores: the loss and the metrics of the file on the same data.
    """

    in_the_shell = True

    path: Path
    format: str
    bytes: int
    operators: dict[str, int]
    low_precision: int = 0
    max_difference: float | None = None
    precision_gap: float | None = None
    float_operators: Mapping[str, int] = field(default_factory=dict)
    calibrated_on: int = 0
    layers: tuple[Int8Layer, ...] = ()
    notes: tuple[str, ...] = ()
    within_one_code: float | None = None
    model_scores: Mapping[str, float] = field(default_factory=dict)
    file_scores: Mapping[str, float] = field(default_factory=dict)

    def _title(self) -> str:
        return f"Export to {self.path}"

    def _tables(self) -> dict[str, list[RenderableType]]:
        names = ("operator", "count", "of them in float32")[: 3 if self.float_operators else 2]
        counts = ((kind, str(count), str(self.float_operators.get(kind, 0))) for kind, count in self.operators.items())
        rows = [cells[: len(names)] for cells in counts]
        tables: dict[str, list[RenderableType]] = {"operators": [ColumnTable("", names, names, names[1:], rows)]}
        if self.layers:
            names = ("layer", "lowest", "highest", "predicted, dB", "file's lowest", "file's highest", "measured, dB")
            cells = [[layer.path, *("" if x is None else f"{x:.3g}" for x in layer[1:])] for layer in self.layers]
            title = "Layers in integers: ranges, and signal-to-noise ratios of the outputs"
            tables["layers"] = [ColumnTable(title, names, (names[0], names[3], names[6]), names[1:], cells)]
        return tables

    def _answer(self) -> list[Sentence]:
        text = f"{self.path}: {self.format}, {self.bytes:,} bytes, {sum(self.operators.values())} operators; "
        text += f"{self.low_precision} tensors are floats of 16 bits or fewer.{_differences(self)}"
        said = [Sentence("", text), *(Sentence("Note", note) for note in self.notes)]
        quantized = self.format.startswith("LiteRT int")
        return said + [Sentence("", line) for line in (self._quantized_lines() if quantized else ())]

    def _quantized_lines(self) -> list[str]:
        kinds = ", ".join(f"{count} {name}" for name, count in self.float_operators.items())
        stay = f"{sum(self.float_operators.values())} operators stay in float32{': ' + kinds if kinds else ''}"
        ranges = f"{self.calibrated_on} records set the ranges" if self.calibrated_on else "Training set the ranges"
        lines = [f"{stay}. {ranges}."]
        if self.within_one_code is not None:
            lines.append(f"{self.within_one_code:.2%} of the output values are within one code of the model's.")
        lines += [
            f"The {name} is {x:.4g} in the model and {self.file_scores[name]:.4g} in the file."
            for name, x in self.model_scores.items()
        ]
        measured = [layer for layer in self.layers if layer.measured is not None]
        worst = sorted(measured, key=lambda layer: layer.measured or 0.0)[:3]
        lines += [layer.line() for layer in worst]
        if self.calibrated_on and worst and (worst[0].measured or 0.0) < LOW_OUTPUT_SQNR:
            scaling = "qat_litert_int16x8" if self.format.endswith("int16x8") else "qat_litert"
            lines.append(f"Below {LOW_OUTPUT_SQNR:.0f} dB convert(model, {scaling!r}), and train for it.")
        return lines


def _differences(report: ExportReport | DeploymentReport) -> str:
    if report.max_difference is None:
        return ""
    text = f" Largest difference from the model: {_small(report.max_difference)} in float32"
    if report.precision_gap is not None:
        text += f", {_small(report.precision_gap)} in its own precision"
    return f"{text}."


def _small(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
