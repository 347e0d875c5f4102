"""The cheapest mix of precisions within a tolerance of float32."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp.conversion.to_float32 import in_float32
from keras_mp.fp8.selection import decide
from keras_mp.numerics.audit import audit
from keras_mp.numerics.audit_report import FORMAT_OF, AuditReport, LayerAudit
from keras_mp.numerics.data import batches_of, check_model
from keras_mp.numerics.search_report import PolicySearch, Trial
from keras_mp.numerics.trial import (
    Assignment,
    CannotMixError,
    Errors,
    Judge,
    is_closed,
    members_of,
    unit_of,
    units_of,
)
from keras_mp.precision.policy import COMPUTES_IN
from keras_mp.rebuild.walk import layers_by_path, own_variables
from keras_mp.reporting.progress import Tell, progress
from keras_mp.system.argument_checks import whole_number

CANDIDATES = ("fp8", "mixed_float16", "mixed_bfloat16", "float32")
# Lowering restored layers again, one by one, costs a trial each.
_MOST_LOWERED_AGAIN = 16


def search_policy(
    model: keras.Model,
    batches: Any,
    precisions: Sequence[str] = CANDIDATES,
    *,
    tolerance: float = 0.2,
    steps: int = 4,
    held_out: int = 2,
) -> PolicySearch:
    """Finds the cheapest precision of each layer.

    Loss and gradients stay within a tolerance of float32.

    ```
    audit the first batches in float32
    everything at the cheapest candidate;  done if it passes on the held-out batches
    restore the layers in order of damage, the least number of them that passes, by bisection
    lower each restored layer again if it passes without
    ```

    A mix passes if, on each held-out batch, |loss - loss32| <= tolerance |loss32|, and, over all weights together,
    ||gradient - gradient32|| <= tolerance ||gradient32||, and no weight's gradient has vanished or is not finite.

    Beside FP8 everything is in bfloat16, as the precision "fp8" is defined; without FP8 layers that do not fit float16
    are tried in bfloat16 before float32, where it is a candidate.

    Each layer inside a custom layer is tried by itself. Where the custom layer's own code fails on tensors of two
    dtypes, as `x + attention` does on TensorFlow, the search begins again with every layer of that class as one.

    Args:
        model: a built Keras model with a loss; it is not changed.
        batches: batches, as for `audit`: the first `steps` are audited, the next `held_out` are judged on. Where there
            are fewer, the last one is held out, or, of one, used for both.
        precisions: names out of "fp8", "mixed_float16", "mixed_bfloat16", "float32", the cheapest first. float32 is
            what is left where the others fail, also when it is not named.
        tolerance: the largest relative difference of loss and gradients. A small GPT that trains as well in bfloat16 as
            in float32 has gradients 0.16 apart at its start (docs/numerics.md).
        steps: the number of batches to audit.
        held_out: the number of batches to judge on.

    Returns:
        The search: print it; `apply(build)` builds a model with it.

    Raises:
        TypeError, ValueError: As for `audit`; also if precisions or tolerance make no sense.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> random = np.random.default_rng(0)
        >>> batches = [(random.normal(size=(16, 8)), random.normal(size=(16, 4))) for _ in range(6)]
        >>> search = keras_mp.search_policy(build(), batches, ("mixed_bfloat16", "float32"))
        >>> model = search.apply(build)
    """
    check_model(model)
    names = ", ".join(map(repr, CANDIDATES))
    if isinstance(precisions, str) or not precisions or not all(name in CANDIDATES for name in precisions):
        raise ValueError(f"precisions={precisions!r} must be some of {names}, cheapest first")
    candidates = list(precisions)
    if len(set(candidates)) < len(candidates):
        raise ValueError(f"precisions={precisions!r} has a name twice")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance!r} must be a finite number, 0 or more")
    steps, held_out = whole_number("steps", steps, unit="batches"), whole_number("held_out", held_out, unit="batches")
    batches = batches_of(batches, steps + held_out)
    judged = batches[-min(held_out, max(1, len(batches) - 1)) :]
    audited = batches[: max(1, len(batches) - len(judged))]
    report = audit(model, audited, steps)
    with in_float32(model), progress("search") as tell:
        judge = Judge(model, judged, report.loss_scale)
        return _Search(model, report, judge, candidates, float(tolerance), tell).run()


class _Search:
    """The bisections of a search."""

    def __init__(
        self, model: keras.Model, report: AuditReport, judge: Judge, candidates: list[str], tolerance: float, tell: Tell
    ) -> None:
        self.model, self.report, self.judge, self.tolerance, self.tell = model, report, judge, tolerance, tell
        self.closed: frozenset[str] = frozenset()
        self.units = units_of(model)
        self.audits = {layer.path: layer for layer in report.layers}
        convertible = [decision.path for decision in decide(model, lambda path, layer: True) if decision.possible]
        self.fp8 = convertible if candidates[0] == "fp8" else []
        lower = [name for name in candidates if name != "fp8"]
        if candidates[0] == "fp8" and self.fp8:
            self.base = "mixed_bfloat16"
        else:
            self.base = lower[0] if lower else "mixed_bfloat16"
        self.above = lower[lower.index(self.base) + 1 :] if self.base in lower else []
        self.above = [name for name in self.above if name != "float32" and not self.fp8]
        self.tried: list[Trial] = []
        self._known: dict[Any, Errors] = {}

    def run(self) -> PolicySearch:
        while True:
            try:
                return self._searched()
            except CannotMixError as error:
                if error.name in self.closed:
                    raise
                self.closed |= {error.name}
                self.units = units_of(self.model, self.closed)
                self.tried = []

    def _searched(self) -> PolicySearch:
        if self.base == "float32":
            return self._result(self._assignment({}, ()), "float32 is the only candidate.")
        cheapest = self._assignment({}, self.fp8)
        if self.fp8 and self._passes(cheapest):
            return self._result(cheapest, f"All layers pass in the cheapest precision: {self._name(cheapest)}.")
        restored = self._restored_units()
        if not restored and not self.fp8:
            return self._result(cheapest, f"All layers pass in the cheapest precision: {self._name(cheapest)}.")
        if len(restored) == len(self.units):
            everything = Assignment("float32", {}, frozenset(), self.closed)
            nearest = min(self.tried, key=lambda trial: max(trial.loss_error, trial.gradient_error))
            return self._result(
                everything,
                f"Nothing below float32 meets a tolerance of {self.tolerance:g}: the nearest, with "
                f"{len(nearest.restored)} layers in a higher precision, was off by "
                f"{max(nearest.loss_error, nearest.gradient_error):.3g}. So all is float32.",
            )
        best = self._with_fp8(restored) if self.fp8 else self._assignment(restored, ())
        count = len(restored)
        return self._result(
            best,
            f"{count} of {len(self.units)} layers need{'s' * (count == 1)} a higher precision; the others compute in "
            f"{self._name(best)}.",
        )

    def _assignment(self, restored: dict[str, str], fp8: Sequence[str]) -> Assignment:
        high = {path for path, precision in restored.items() if precision == "float32"}
        inside = frozenset(path for path in fp8 if unit_of(path, self.units) not in high)
        return Assignment(self.base, dict(restored), inside, self.closed)

    def _passes(self, assignment: Assignment) -> bool:
        """Tries a mix, once, and notes the trial."""
        # Without exceptions it is the same mix however the layers are put together.
        closed = assignment.closed if assignment.units else frozenset()
        key = (assignment.base, frozenset(assignment.units.items()), assignment.fp8, closed)
        if key not in self._known:
            self.tell(f"a mix with {len(assignment.units)} of {len(self.units)} layers in a higher precision")
            self._known[key] = self.judge.errors(assignment)
            self.tell("", 1)
        self._last = errors = self._known[key]
        passed = errors.worst <= self.tolerance
        restored = tuple(assignment.units)
        self.tried.append(Trial(len(assignment.fp8), restored, errors.loss, errors.gradients, passed))
        return passed

    def _restored_units(self) -> dict[str, str]:
        """The fewest units that must be above the base."""
        if self._passes(self._assignment({}, ())):
            return {}
        order, enough = self._nonfinite_first(sorted(self.units, key=self._damage, reverse=True))

        def passes(count: int) -> bool:
            return self._passes(self._assignment(dict.fromkeys(order[:count], level), ()))

        for level in [*self.above, "float32"]:
            if level == "float32" or passes(enough):
                count = 1 + bisect_left(range(1, enough), True, key=passes)
                break
        restored = dict.fromkeys(order[:count], level)
        for path in reversed(order[:count]) if count <= _MOST_LOWERED_AGAIN else ():
            fewer = {other: level for other in restored if other != path}
            if self._passes(self._assignment(fewer, ())):
                restored = fewer
        return restored

    def _nonfinite_first(self, order: list[str]) -> tuple[list[str], int]:
        """Unsafe units first; how many of them are enough."""
        first = [path for path in order if not all(one.verdicts[self.base].ok for one in self._members(path))]
        for _ in range(len(order)):
            unit = unit_of(self._last.nonfinite, self.units)
            if unit and unit not in first:
                first.append(unit)
            if not first or tuple(first) == self.tried[-1].restored:
                break  # what is wrong is no infinity, or it comes up in a layer that is restored already
            if self._passes(self._assignment(dict.fromkeys(first, "float32"), ())):
                return [*first, *(path for path in order if path not in first)], len(first)
        return [*first, *(path for path in order if path not in first)], len(order)

    def _with_fp8(self, restored: dict[str, str]) -> Assignment:
        """As many layers in FP8 as pass, least damaged first."""

        def damage(path: str) -> float:
            layer = self.audits.get(path)
            return max(layer.input_damage["E4M3"], layer.gradient_error["E5M2"]) if layer else math.inf

        def fails(count: int) -> bool:
            return not self._passes(self._assignment(restored, order[:count]))

        order = sorted(self.fp8, key=damage)
        count = bisect_left(range(1, len(order) + 1), True, key=fails)
        return self._assignment(restored, order[:count])

    def _members(self, path: str) -> list[LayerAudit]:
        inside = [layer for name, layer in self.audits.items() if name == path or name.startswith(f"{path}/")]
        return inside if is_closed(self.units[path], self.closed) else [layer for layer in inside if layer.path == path]

    def _damage(self, path: str) -> float:
        name = FORMAT_OF[self.base]
        return max((max(layer.damage[name], layer.gradient_error[name]) for layer in self._members(path)), default=0.0)

    def _name(self, assignment: Assignment) -> str:
        base = COMPUTES_IN[assignment.base]
        return f"{base} with {len(assignment.fp8)} layers in FP8" if assignment.fp8 else base

    def _result(self, assignment: Assignment, message: str) -> PolicySearch:
        policies = {
            member.path or member.name: keras.DTypePolicy(precision)
            for path, precision in assignment.units.items()
            for member in members_of(self.units[path], self.closed)
        }
        return PolicySearch(
            assignment.base,
            dict(assignment.units),
            tuple(path for path in self.fp8 if path in assignment.fp8),
            keras.dtype_policies.DTypePolicyMap(assignment.base, policies),
            self.tried,
            self._shares(assignment),
            self.report.loss_scale,
            self.tolerance,
            message,
            self.report,
            tuple(self.units),
            tuple(sorted(self.closed)),
        )

    def _shares(self, assignment: Assignment) -> dict[str, float]:
        weights = dict.fromkeys(CANDIDATES, 0)
        for path, layer in layers_by_path(self.model).items():
            precision = "fp8" if path in assignment.fp8 else assignment.precision(unit_of(path, self.units))
            weights[precision] += sum(math.prod(weight.shape) for weight in own_variables(layer))
        total = sum(weights.values()) or 1
        return {name: count / total for name, count in weights.items()}
