"""The data of an audit, by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_mp.numerics.ranges import Range
from keras_mp.numerics.verdict import Verdict
from keras_mp.precision.formats import FORMATS
from keras_mp.reporting.plain_values import plain_values

# What each precision rounds a layer's tensors to; FP8 rounds what goes into a product.
FORMAT_OF = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16", "fp8": "E4M3"}


@dataclass
class LayerAudit:
    """The audit of a layer.

    Attributes:
        path: the names that lead to it, joined with `/`.
        kind: its class.
        calls: how often a step calls it.
        flops: of its matrix products and convolutions in a forward pass.
        ranges: by tensor: "input", "output", "kernel" (its weights), "kernel gradient", "output gradient", and those
            inside: "before activation", "scores".
        damage: by format, what rounding its output and its weights changes the loss by, as a share of the loss, to
            first order: sqrt(sum (gradient . rounding error)^2), as if the errors were independent. Infinite where a
            value overflows.
        input_damage: by format, the same for rounding its inputs and its weights, as an FP8 product does.
        gradient_error: by format, the size of the error of its gradients, of that of the gradients: float16 at the
            recommended loss scale, the 8-bit formats at max / amax.
        scales: the lowest and the highest loss scale, powers of two, at which at most 1% of its gradients become zero
            in float16 and none overflows; None where it has no gradient.
        verdicts: by precision: "mixed_float16", "mixed_bfloat16", "fp8".
        layer: the live layer, of the float32 model.
    """

    path: str
    kind: str
    calls: int = 0
    flops: int = 0
    ranges: dict[str, Range] = field(default_factory=dict)
    damage: dict[str, float] = field(default_factory=dict)
    input_damage: dict[str, float] = field(default_factory=dict)
    gradient_error: dict[str, float] = field(default_factory=dict)
    scales: tuple[float, float] | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    layer: keras.Operation | None = field(default=None, repr=False)


@dataclass
class Suspect:
    """A layer that a precision does not fit as it is.

    Attributes:
        path: the layer's.
        tensor: which of its tensors.
        reason: why, a sentence.
        remedy: what to do.
        safe: whether the remedy is the loss scale alone.
    """

    path: str
    tensor: str
    reason: str
    remedy: str
    safe: bool


@dataclass
class LayerAudits:
    """The result of `audit`.

    Attributes:
        model: the model's name.
        steps: how many batches were looked at.
        loss: the mean loss in float32.
        loss_scale: the recommended initial loss scale for float16: the largest power of two that leaves every gradient
            a factor of 16 below float16's largest number, within `LossScale`'s floor and ceiling.
        layers: in the order of their first call.
        seconds: of each step, the first with its compilation.
        notes: what else to know.
    """

    model: str
    steps: int
    loss: float
    loss_scale: float
    layers: list[LayerAudit]
    seconds: list[float]
    notes: list[str]

    def suspects(self, precision: str = "mixed_float16") -> list[Suspect]:
        """The layers that a precision does not fit as they are, worst first.

        First those whose values overflow, in the order of the forward pass; then those whose values or gradients are
        lost, by how much; last those that the loss scale saves.

        Args:
            precision: "mixed_float16", "mixed_bfloat16" or "fp8".

        Raises:
            ValueError: another precision.
        """
        if precision not in FORMAT_OF:
            raise ValueError(f"precision={precision!r} must be one of {', '.join(map(repr, FORMAT_OF))}")
        ranked = []
        for place, layer in enumerate(self.layers):
            judged = layer.verdicts[precision]
            if judged.ok and not judged.remedy or precision == "fp8" and not judged.tensor:
                continue
            damage = layer.damage[FORMAT_OF[precision]]
            error = layer.gradient_error[FORMAT_OF[precision]]
            rank = (judged.ok, -damage if math.isinf(damage) else -max(damage, error), place)
            ranked.append((rank, Suspect(layer.path, judged.tensor, judged.reason, judged.remedy, judged.ok)))
        return [suspect for _, suspect in sorted(ranked, key=lambda pair: pair[0])]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        names = ("model", "steps", "loss", "loss_scale", "seconds", "notes")
        layers = [_layer_dict(audited) for audited in self.layers]
        return plain_values({name: getattr(self, name) for name in names} | {"layers": layers})


def _layer_dict(audited: LayerAudit) -> dict[str, Any]:
    names = ("path", "kind", "calls", "flops", "damage", "input_damage", "gradient_error", "scales", "verdicts")
    tensors = {role: _range_dict(values) for role, values in audited.ranges.items()}
    return {name: getattr(audited, name) for name in names} | {"tensors": tensors}


def _range_dict(values: Range) -> dict[str, Any]:
    names = ("values", "zeros", "nan", "inf", "lowest", "highest", "smallest")
    formats = {name: vars(values.loss(name)) for name in FORMATS}
    return {name: getattr(values, name) for name in names} | {"formats": formats}
