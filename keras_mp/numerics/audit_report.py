"""The report of `audit`, by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from keras_mp.numerics.ranges import Range
from keras_mp.numerics.verdict import Verdict
from keras_mp.precision.formats import FORMATS
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import shorten_middle
from keras_mp.system.argument_checks import one_of

_PRECISIONS = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16", "fp8": "FP8"}
_SUSPECT = ("layer", "fits with the loss scale", "tensor", "why", "remedy")
_MOST_SUSPECTS = 12
_NAMED = 40  # characters of a layer's name in a sentence
_TABLE = ("layer", "output", "kernel", "output gradient", *_PRECISIONS.values())


@dataclass
class LayerAudit:
    """The audit of a layer.

    Attributes:
        path: the names that lead to the layer, joined with `/`.
        kind: the name of the layer's class.
        calls: the number of times that a step calls it.
        ranges: the range of each tensor: "input", "output", "kernel" (its weights), "kernel gradient", "output
            gradient", and of the tensors inside: "before activation", "scores".
        response: the error of the layer's result, for float16 and bfloat16, if its arguments and weights are rounded,
            and code that is not Keras's computes in that precision: as a share of the size of the result. A sentence
            where the code fails; nothing for a layer that hands values on, or is in float32 among others in 16 bits.
        verdicts: the verdict for each precision: "mixed_float16", "mixed_bfloat16", "fp8".
    """

    path: str
    kind: str
    calls: int = 0
    ranges: dict[str, Range] = field(default_factory=dict)
    response: dict[str, float | str] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


@dataclass
class Suspect:
    """A layer that a precision does not fit."""

    path: str
    tensor: str  # the name of the one that decides
    reason: str
    remedy: str
    safe: bool  # whether the remedy is the loss scale alone


@dataclass
class AuditReport(Report):
    """The result of `audit`.

    Attributes:
        model: the name of the model.
        steps: the number of batches that were looked at.
        loss: the mean loss in float32.
        loss_scale: the recommended initial loss scale for float16: the largest power of two that leaves every gradient
            a factor of 16 below float16's largest number, within `LossScale`'s floor and ceiling.
        layers: the audit of each layer, in the order of their first call.
        notes: sentences on what else to know.
        quantized: a sentence on "int8" and "int4", Keras's quantizations, where one loses much of some layers' weights.
    """

    in_the_shell = True

    model: str
    steps: int
    loss: float
    loss_scale: float
    layers: list[LayerAudit]
    notes: list[str]
    quantized: dict[str, str] = field(default_factory=dict)

    def suspects(self, precision: str = "mixed_float16") -> list[Suspect]:
        """Lists layers that a precision does not fit, worst first.

        First those whose values overflow, in the order of the forward pass; then those that lose, by how much; last
        those that the loss scale saves.

        Args:
            precision: "mixed_float16", "mixed_bfloat16" or "fp8".

        Raises:
            ValueError: If the precision is none of the three.
        """
        one_of("precision", precision, _PRECISIONS)
        ranked = []
        for place, layer in enumerate(self.layers):
            judged = layer.verdicts[precision]
            if judged.ok and not judged.remedy or precision == "fp8" and not judged.tensor:
                continue
            rank = (judged.ok, -judged.error, place)
            ranked.append((rank, Suspect(layer.path, judged.tensor, judged.reason, judged.remedy, judged.ok)))
        return [suspect for _, suspect in sorted(ranked, key=lambda pair: pair[0])]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values, as JSON has them."""
        names = ("model", "steps", "loss", "loss_scale", "notes", "quantized")
        of_layer = ("path", "kind", "calls", "response", "verdicts")
        of_tensor = ("values", "zeros", "nonfinite", "lowest", "highest")
        layers = []
        for audited in self.layers:
            tensors = {}
            for role, values in audited.ranges.items():
                formats = {name: vars(values.loss(name)) for name in FORMATS}
                tensors[role] = {name: getattr(values, name) for name in of_tensor} | {"formats": formats}
            layers.append({name: getattr(audited, name) for name in of_layer} | {"tensors": tensors})
        return plain_values({name: getattr(self, name) for name in names} | {"layers": layers})

    def _title(self) -> str:
        return f"Audit of {self.model}"

    def _answer(self) -> list[Sentence]:
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        said = [Sentence("", f"{self.model} ran {steps} in float32; the mean loss is {self.loss:.4g}.")]
        verdicts = {
            "float16": f"{_fitting(self, 'mixed_float16')}, at an initial loss scale of {self.loss_scale:g}",
            "bfloat16": _fitting(self, "mixed_bfloat16"),
            "FP8": _fitting_fp8(self),
            **self.quantized,
        }
        said += [Sentence(name, f"{verdict}.") for name, verdict in verdicts.items()]
        said += [Sentence("Note", note, rank=2 * _MOST_SUSPECTS) for note in self.notes]
        suspects = self.suspects()
        unsafe, saved = ([s for s in suspects if s.safe == safe] for safe in (False, True))
        for place, suspect in enumerate(unsafe[:_MOST_SUSPECTS]):
            text = f"{shorten_middle(suspect.path, _NAMED)}: {suspect.reason}; {suspect.remedy}."
            said.append(Sentence("unsafe in float16", text, rank=1 + place))
        if len(unsafe) > _MOST_SUSPECTS:
            said.append(Sentence("", f"and {len(unsafe) - _MOST_SUSPECTS} more"))
        if saved:
            worst = saved[0]
            layer = shorten_middle(worst.path, _NAMED)
            needs = f"{layer} needs one" if len(saved) == 1 else f"{len(saved)} layers need one, {layer} the most"
            text = f"{needs}: {worst.reason}; {worst.remedy}."
            said.append(Sentence("loss scale", text, rank=1 + _MOST_SUSPECTS))
        return said

    def _tables(self) -> dict[str, list[RenderableType]]:
        layers = ColumnTable(
            "Layers, the worst in float16 first: ranges, and what fits",
            _TABLE,
            narrow=(_TABLE[0], *_PRECISIONS.values()),
            right=_TABLE[1:4],
            rows=map(_cells, sorted(self.layers, key=lambda layer: -layer.verdicts["mixed_float16"].error)),
        )
        tables: dict[str, list[RenderableType]] = {"layers": [layers]}
        for precision, name in _PRECISIONS.items():
            rows = [(s.path, "yes" if s.safe else "no", s.tensor, s.reason, s.remedy) for s in self.suspects(precision)]
            if rows:
                title = f"Layers to watch in {name}, the worst at the top"
                tables[name] = [ColumnTable(title, _SUSPECT, (_SUSPECT[0], *_SUSPECT[3:]), rows=rows)]
        return tables


def _fitting(report: AuditReport, precision: str) -> str:
    verdicts = [layer.verdicts[precision] for layer in report.layers]
    unfit = sum(not verdict.ok and verdict.tried for verdict in verdicts)
    untried = sum(not verdict.tried for verdict in verdicts)
    count = len(verdicts)
    tail = f"{untried} could not be tried" if untried else ""
    if unfit:
        said = f"{unfit} of {count} layers {'does' if unfit == 1 else 'do'} not fit"
        return f"{said}, {tail}" if tail else said
    return f"{count - untried} of {count} layers fit, {tail}" if tail else f"all {count} layers fit"


def _fitting_fp8(report: AuditReport) -> str:
    verdicts = [layer.verdicts["fp8"] for layer in report.layers]
    candidates = [layer.verdicts["fp8"] for layer in report.layers if _judged_in_fp8(layer)]
    if not candidates:
        quantized = any("quantized" in verdict.reason for verdict in verdicts)
        none = (
            "the Dense and EinsumDense layers are quantized" if quantized else "there is no Dense or EinsumDense layer"
        )
        return f"{none}, and no other layer computes in FP8"
    fitting = sum(verdict.ok for verdict in candidates)
    if len(candidates) == 1:
        counted = f"the only Dense or EinsumDense layer {'fits' if fitting else 'does not fit'}"
    else:
        counted = f"{fitting} of {len(candidates)} Dense and EinsumDense layers fit"
    return f"{counted}; no other layer computes in FP8"


def _cells(layer: LayerAudit) -> list[str]:
    """The cells of a layer, as in `_TABLE`."""
    name = layer.path + (f" ({layer.calls} calls)" if layer.calls > 1 else "")
    words = ["yes" if verdict.ok else f"no: {verdict.tensor}" for verdict in layer.verdicts.values()]
    words[-1] = words[-1] if _judged_in_fp8(layer) else "-"
    ranges = [_span(layer.ranges.get(role)) for role in ("output", "kernel", "output gradient")]
    return [name, *ranges, *words]


def _span(values: Range | None) -> str:
    """The lowest and the highest value."""
    if values is None or not math.isfinite(values.lowest):
        return "-"
    return f"{values.lowest:.3g} to {values.highest:.3g}"


def _judged_in_fp8(audited: LayerAudit) -> bool:
    """Whether a layer computes in FP8."""
    verdict = audited.verdicts["fp8"]
    return verdict.ok or bool(verdict.tensor)
