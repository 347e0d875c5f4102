"""The same training in several precisions and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.fp8.convert import convert
from keras_mp.numerics.data import batches_of
from keras_mp.precision.policy import POLICIES
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.progress import progress
from keras_mp.reporting.report import Report, plain_values
from keras_mp.reporting.table import ColumnTable
from keras_mp.system.argument_checks import whole_number

REFERENCE = "float32"


@dataclass
class ParityReport(Report):
    """The result of `compare_training`.

    Attributes:
        steps: the number of steps of each training.
        seeds: the number of seeds: 0, 1, ...
        curves: the training loss by step, a list a seed, by precision.
        final: the loss at the end, a number a seed, by precision: the mean of the last tenth of the steps.
    """

    steps: int
    seeds: int
    curves: dict[str, list[list[float]]]
    final: dict[str, list[float]]

    @property
    def spread(self) -> float:
        """Highest minus lowest final loss of the float32 seeds."""
        return max(self.final[REFERENCE]) - min(self.final[REFERENCE])

    def difference(self, precision: str) -> float:
        """Mean final loss minus float32's, seed by seed."""
        pairs = zip(self.final[precision], self.final[REFERENCE], strict=True)
        return statistics.mean(mine - theirs for mine, theirs in pairs)

    def within_noise(self, precision: str) -> bool | None:
        """Whether the difference is within the spread, if known."""
        if not all(map(math.isfinite, self.final[precision])):
            return False
        if self.seeds < 2:
            return None
        return abs(self.difference(precision)) <= self.spread

    def verdict(self, precision: str) -> str:
        """The verdict on a precision, a sentence."""
        final = self.final[precision]
        bad = [seed for seed, loss in enumerate(final) if not math.isfinite(loss)]
        if bad:
            return f"{precision} diverges: the loss of seed {', '.join(map(str, bad))} is not finite."
        difference = self.difference(precision)
        which = "above" if difference > 0 else "below"
        said = f"{precision} ends {abs(difference):.3g} {which} float32 in the loss, the mean of {len(final)} seeds"
        within = self.within_noise(precision)
        if within is None:
            return f"{said}. One seed has no spread to judge it by."
        word = "within seed noise" if within else f"{'worse' if difference > 0 else 'better'} than seed noise"
        return f"{said}. The float32 seeds are {self.spread:.3g} apart, so this is {word}."

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; infinities and NaN as strings."""
        return plain_values(vars(self) | {"verdicts": {name: self.verdict(name) for name in self._others}})

    def _title(self) -> str:
        return "The same training in several precisions"

    def _answer(self) -> list[Sentence]:
        names = ["precision", *(f"seed {seed}" for seed in range(self.seeds)), "mean", "minus float32"]
        rows = []
        for name, final in self.final.items():
            difference = "" if name == REFERENCE else f"{self.difference(name):+.4f}"
            rows.append([name, *(f"{loss:.4f}" for loss in final), f"{statistics.mean(final):.4f}", difference])
        shown = ColumnTable(
            "Final loss: the mean of the last tenth of the steps", names, narrow=names, right=names[1:], rows=rows
        )
        return [*(Sentence("", self.verdict(name)) for name in self._others), Sentence("", "", below=shown)]

    @property
    def _others(self) -> list[str]:
        return [name for name in self.final if name != REFERENCE]


def compare_training(
    build: Callable[[], keras.Model],
    batches: Any,
    precisions: Sequence[str] | Mapping[str, Any] = (REFERENCE, "mixed_bfloat16"),
    *,
    seeds: int = 3,
    steps: int | None = None,
) -> ParityReport:
    """Trains a model in several precisions.

    Each has the same seeds, data and initial weights.

    ```
    for each seed:
        weights = the initial weights of build() in float32
        for each precision:
            train build() in it from those weights, batch after batch
            final loss = the mean of the last tenth of the steps
    verdict: is |mean(final - final32)| <= max(final32) - min(final32)?
    ```

    Args:
        build: a function that builds and compiles the model; it is called under the policy of each precision. Under
            "fp8", which is mixed_bfloat16, all Dense and EinsumDense layers that can be are then converted to FP8.
        batches: batches, as for `audit`; they are read again from the start when they run out.
        precisions: names of "float32", "mixed_float16", "mixed_bfloat16", "fp8"; or for each name of your own one of
            these, or a function that builds the model. float32 is always run.
        seeds: the number of seeds.
        steps: the number of steps of each training; by default one pass over the batches.

    Returns:
        The report, to print.

    Raises:
        TypeError: If build is no function, or returns no compiled model.
        ValueError: If a precision is unknown, if there are no seeds, no steps or no data, or if models of one seed
            differ in weights.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> batches = [(np.ones((16, 8)), np.ones((16, 4)))] * 4
        >>> report = keras_mp.numerics.compare_training(build, batches, ["float32", "mixed_bfloat16"], seeds=2)
        >>> sorted(report.final)
        ['float32', 'mixed_bfloat16']
    """
    builders = _builders(build, precisions)
    seeds = whole_number("seeds", seeds)
    if steps is not None:
        steps = whole_number("steps", steps, otherwise="or None")
    data = batches_of(batches, steps or 2**31)
    steps = steps or len(data)
    curves: dict[str, list[list[float]]] = {name: [] for name in builders}
    with progress("trainings", seeds * len(builders)) as tell:
        for seed in range(seeds):
            weights: list[np.ndarray] = []
            for name, make in builders.items():
                tell(f"{name}, seed {seed}")
                model = _built(make, seed)
                weights = weights or [np.copy(weight) for weight in model.get_weights()]
                if [tuple(weight.shape) for weight in model.weights] != [weight.shape for weight in weights]:
                    raise ValueError(
                        f"the model of {name!r} has other weights than that of float32, so it cannot start from them"
                    )
                model.set_weights(weights)
                curves[name].append(_train(model, data, steps))
                tell("", 1)
    last = max(1, steps // 10)
    final = {name: [float(np.mean(losses[-last:])) for losses in seeded] for name, seeded in curves.items()}
    return ParityReport(steps, seeds, curves, final)


def _builders(build: Any, precisions: Any) -> dict[str, Callable[[], keras.Model]]:
    if not callable(build) or isinstance(build, keras.Model):
        raise TypeError(f"build={build!r} must be a function without arguments that returns a compiled keras.Model")
    if isinstance(precisions, str) or not precisions:
        raise ValueError(f"precisions={precisions!r} must be a list of names, or a dict")
    wanted = dict(precisions) if isinstance(precisions, Mapping) else {name: name for name in precisions}
    wanted = {REFERENCE: REFERENCE, **wanted}
    builders = {}
    for name, way in wanted.items():
        if callable(way):
            builders[name] = _under(REFERENCE, way)
        elif way == "fp8":
            builders[name] = lambda: convert(_under("mixed_bfloat16", build)(), select=lambda path, layer: True)
        elif way in POLICIES and way != "auto":
            builders[name] = _under(way, build)
        else:
            known = ", ".join(repr(policy) for policy in POLICIES if policy != "auto")
            raise ValueError(f"precisions names {way!r}: use {known}, or a function that builds the model")
    return builders


def _under(policy: str, build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def make() -> Any:
        # Not set_global_policy, which warns where a precision gains no speed on this hardware.
        with restored_policy(policy):
            return build()

    return make


def _built(make: Callable[[], Any], seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = make()
    if not isinstance(model, keras.Model) or not model.compiled or model.optimizer is None:
        built = "a model that is not compiled with an optimizer" if isinstance(model, keras.Model) else repr(model)
        raise TypeError(f"build() must return a compiled keras.Model, got {built}")
    if not model.built:
        raise ValueError(f"build() returned model {model.name!r} unbuilt: give it an Input, or call it once on a batch")
    return model


def _train(model: keras.Model, batches: list[tuple], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x, y, sample_weight = batches[step % len(batches)]
        model.reset_metrics()  # Keras returns the mean since the last reset
        losses.append(float(model.train_on_batch(x, y, sample_weight, return_dict=True)["loss"]))
    return losses
