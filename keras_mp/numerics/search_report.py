"""The result of a search for precisions, which builds models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
from rich.console import RenderableType

from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.fp8.convert import convert
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.numerics.audit_report import AuditReport
from keras_mp.numerics.trial import Assignment, set_policies, unit_of, units_of
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import shorten_middle
from keras_mp.stability.attention import ATTENTION, attending
from keras_mp.treatment.change import change, infer_again

_NAMED = 60  # characters of a layer's name in a sentence


class Trial(NamedTuple):
    """A mix of precisions that was tried.

    Attributes:
        fp8: the number of layers that were in FP8.
        restored: paths of the layers above the base precision.
        loss_error: relative difference of the loss from float32, the largest of the held-out batches.
        gradient_error: the relative difference of all gradients together from float32, the largest of the held-out
            batches.
        passed: whether both were within the tolerance.
    """

    fp8: int
    restored: tuple[str, ...]
    loss_error: float
    gradient_error: float
    passed: bool


@dataclass
class PolicySearch(Report):
    """The result of `search_policy`.

    Attributes:
        base: the precision of every layer that is not named: "mixed_float16", "mixed_bfloat16" or "float32".
        restored: the layers that were given a higher precision, and which, by path.
        fp8_layers: paths of the Dense and EinsumDense layers that compute in FP8.
        policy: a `keras.dtype_policies.DTypePolicyMap` of base and restored, for
            `keras.config.set_dtype_policy(search.policy)` before a model is built of layers with the same names.
        tried: the mixes in the order in which they were tried.
        shares: the share of the weights in each precision.
        loss_scale: the initial loss scale to begin float16 with.
        tolerance: the largest relative difference that was allowed.
        message: a sentence that says what was found.
        audit: the report that gave the order.
        layers: paths of the layers that were searched.
        closed: classes of custom layers, as "module.Class", whose code cannot mix precisions: what is inside such a
            layer has its precision.
    """

    base: str
    restored: dict[str, str]
    fp8_layers: tuple[str, ...]
    policy: Any
    tried: list[Trial]
    shares: dict[str, float]
    loss_scale: float
    tolerance: float
    message: str
    audit: AuditReport = field(repr=False)
    layers: tuple[str, ...] = field(repr=False)
    closed: tuple[str, ...] = ()

    @property
    def uses_float16(self) -> bool:
        """Whether a layer computes in float16, so that the loss must be scaled."""
        return "mixed_float16" in {self.base, *self.restored.values()}

    def apply(self, build: Callable[[], keras.Model]) -> keras.Model:
        """Builds a model in the precisions that were found.

        Args:
            build: a function that builds the model, compiled or not, built or not yet trained, as it was given to
                `search_policy`. Layers are found by path, and by their order where automatic names differ.

        Returns:
            The model. Where a layer computes in float16 and it is compiled, its optimizer scales the loss, from
            `loss_scale` on.

        Raises:
            TypeError: If build is no function, or returns no model.
            ValueError: If the model has other layers than the one that was searched.
        """
        if not callable(build) or isinstance(build, keras.Model):
            raise TypeError(f"build={build!r} must be a function without arguments that returns a keras.Model")
        with restored_policy("float32"):
            model = build()
        if not isinstance(model, keras.Model):
            raise TypeError(f"build() must return a keras.Model, got {type(model).__name__}")
        closed = frozenset(self.closed)
        names = _same_layers(model, self.layers, closed)  # of the searched model, in this one
        units = {names[path]: precision for path, precision in self.restored.items()}
        set_policies(model, Assignment(self.base, units, frozenset(), closed))
        infer_again(model, set(map(id, layers_by_path(model).values())))
        change(model, [(part, {ATTENTION: None}) for part in attending(model)])  # as in the search
        if self.fp8_layers:
            units_of_fp8 = {path: unit_of(path, names) for path in self.fp8_layers}
            wanted = {names.get(unit, unit) + path[len(unit) :] for path, unit in units_of_fp8.items()}
            model = convert(model, select=lambda path, layer: path in wanted)
        if self.uses_float16 and getattr(model, "compiled", False) and model.optimizer is not None:
            if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
                model.optimizer = LossScaleOptimizer(model.optimizer, initial_scale=self.loss_scale)
        return model

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values, without `policy`, which base and restored define, and `audit`."""
        names = ("message", "base", "restored", "fp8_layers", "shares", "loss_scale", "tolerance", "tried", "layers")
        return plain_values({name: getattr(self, name) for name in (*names, "closed")})

    def _title(self) -> str:
        return "Precision of each layer"

    def _answer(self) -> list[Sentence]:
        said = [Sentence("", self.message)]
        shares = ", ".join(f"{share:.1%} in {name}" for name, share in self.shares.items() if share)
        mixes = "mix was" if len(self.tried) == 1 else "mixes were"
        said.append(Sentence("Weights", f"{shares or 'none'}. {len(self.tried)} {mixes} tried."))
        closed = (name.rpartition(".")[2] for name in self.closed)
        said += [Sentence("", f"Each {name} has one precision: its code cannot mix them", rank=1) for name in closed]
        named = ((shorten_middle(path, _NAMED), precision) for path, precision in self.restored.items())
        return said + [Sentence(path, precision, rank=2) for path, precision in named]

    def _tables(self) -> dict[str, list[RenderableType]]:
        names = ("layer", "precision")
        others = {path: self.base for path in self.layers if path not in self.restored}
        layers = {**self.restored, **others, **dict.fromkeys(self.fp8_layers, "fp8")}.items()
        title = f"Mixes tried, within a tolerance of {self.tolerance:g} or not"
        columns = ("mix", "in FP8", "restored", "error of the loss", "of the gradients", "passed")
        tried = ColumnTable(title, columns, columns, columns[:5])
        for number, trial in enumerate(self.tried, 1):
            errors = (f"{trial.loss_error:.3g}", f"{trial.gradient_error:.3g}")
            passed = "yes" if trial.passed else "no"
            tried.add_row(str(number), str(trial.fp8), str(len(trial.restored)), *errors, passed)
        return {"layers": [ColumnTable("Layers, those restored first", names, names, rows=layers)], "tried": [tried]}


def _same_layers(model: keras.Model, expected: tuple[str, ...], closed: frozenset[str]) -> dict[str, str]:
    """The path in another model, by the searched one's."""
    mine = list(units_of(model, closed))
    if set(mine) == set(expected):
        return {path: path for path in expected}
    if len(mine) != len(expected):
        raise ValueError(
            f"build() made a model with {len(mine)} layers, and the one that was searched has {len(expected)}"
        )
    return dict(zip(expected, mine, strict=True))
