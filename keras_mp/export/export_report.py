"""The reports of the exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
        precision_gap: the same from the model in its own precision: what the low precision cost on this batch; None,
            too, where that cannot be run: a CPU has no float16 kernel for some layers.
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
        precision_gap: the same from the model in its own precision; None, too, where that cannot be run here.
        float_operators: the number of operators of a quantized file that compute in float32 all the same, by kind.
        calibrated_on: the number of records that set the ranges of a quantized file.
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
        return {"operators": [ColumnTable("", names, names, names[1:], rows)]}

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
        return lines + [
            f"The {name} is {x:.4g} in the model and {self.file_scores[name]:.4g} in the file."
            for name, x in self.model_scores.items()
        ]


def _differences(report: ExportReport | DeploymentReport) -> str:
    if report.max_difference is None:
        return ""
    text = f" Largest difference from the model: {_small(report.max_difference)} in float32"
    if report.precision_gap is not None:
        text += f", {_small(report.precision_gap)} in its own precision"
    return f"{text}."


def _small(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
