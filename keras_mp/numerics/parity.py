"""The same training in several precisions and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    The picture has the difference of the loss from float32's by step, a line a precision, beside the spread of the
    float32 seeds.

    Attributes:
        steps: the number of steps of each training.
        seeds: the seeds, in the order of the lists below.
        curves: the training loss by step, a list a seed, by precision.
        final: the loss at the end, a number a seed, by precision.
        final_is: the kind of that loss: of held-out batches, or the mean of the last tenth of the steps.
    """

    steps: int
    seeds: list[int]
    curves: dict[str, list[list[float]]]
    final: dict[str, list[float]]
    final_is: str

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
        if len(self.seeds) < 2:
            return None
        return abs(self.difference(precision)) <= self.spread

    def verdict(self, precision: str) -> str:
        """The verdict on a precision, a sentence."""
        final = self.final[precision]
        bad = [seed for seed, loss in zip(self.seeds, final, strict=True) if not math.isfinite(loss)]
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
        names = ["precision", *(f"seed {seed}" for seed in self.seeds), "mean", "minus float32"]
        rows = []
        for name, final in self.final.items():
            difference = "" if name == REFERENCE else f"{self.difference(name):+.4f}"
            rows.append([name, *(f"{loss:.4f}" for loss in final), f"{statistics.mean(final):.4f}", difference])
        shown = ColumnTable(f"Final loss: {self.final_is}", names, narrow=names, right=names[1:], rows=rows)
        return [*(Sentence("", self.verdict(name)) for name in self._others), Sentence("", "", below=shown)]

    @property
    def _others(self) -> list[str]:
        return [name for name in self.final if name != REFERENCE]


def compare_training(
    build: Callable[[], keras.Model],
    batches: Any,
    precisions: Sequence[str] | Mapping[str, Any] = (REFERENCE, "mixed_bfloat16"),
    *,
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    held_out: Any = None,
) -> ParityReport:
    """Trains a model in several precisions.

    Each has the same seeds, data and initial weights.

    ```
    for each seed:
        weights = the initial weights of build() in float32
        for each precision:
            train build() in it from those weights, batch after batch
            final loss = of the held-out batches, or the mean of the last tenth of the steps
    verdict: is |mean(final - final32)| <= max(final32) - min(final32)?
    ```

    Args:
        build: a function that builds and compiles the model; it is called under the policy of each precision. Under
            "fp8", which is mixed_bfloat16, all Dense and EinsumDense layers that can be are then converted to FP8.
        batches: batches, as for `audit`, or a function from a seed to them; they are read again from the start when
            they run out.
        precisions: names of "float32", "mixed_float16", "mixed_bfloat16", "fp8"; or for each name of your own one of
            these, or a function that builds the model. float32 is always run.
        seeds: the number of seeds, or the seeds.
        steps: the number of steps of each training; by default one pass over the batches.
        held_out: batches to measure the final loss on, in the precision that was trained.

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
    numbers = _seeds(seeds)
    if steps is not None:
        steps = whole_number("steps", steps, otherwise="or None")
    tests = None if held_out is None else batches_of(held_out, 2**31, "held_out")
    curves: dict[str, list[list[float]]] = {name: [] for name in builders}
    final: dict[str, list[float]] = {name: [] for name in builders}
    shared = None if callable(batches) else batches_of(batches, steps or 2**31)
    taken = steps or 0
    with progress("trainings", len(numbers) * len(builders)) as tell:
        for seed in numbers:
            drawn = batches_of(batches(seed), steps or 2**31) if shared is None else shared
            taken = steps or len(drawn)
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
                losses = _train(model, drawn, taken)
                curves[name].append(losses)
                final[name].append(_final(model, losses, tests))
                tell("", 1)
    final_is = "of the held-out batches" if tests is not None else "the mean of the last tenth of the steps"
    return ParityReport(taken, numbers, curves, final, final_is)


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


def _seeds(seeds: Any) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    if not isinstance(numbers, Iterable) or isinstance(numbers, str):
        raise ValueError(f"seeds={seeds!r} must be how many, or a list of whole numbers")
    numbers = list(numbers)
    if not numbers or not all(isinstance(seed, int) and seed >= 0 for seed in numbers):
        raise ValueError(f"seeds={seeds!r} must be how many, 1 or more, or a list of whole numbers")
    return numbers


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


def _final(model: keras.Model, losses: list[float], tests: list[tuple] | None) -> float:
    if tests is None:
        return float(np.mean(losses[-max(1, len(losses) // 10) :]))
    total, count = 0.0, 0.0
    for x, y, sample_weight in tests:
        size = len(keras.tree.flatten(x)[0])
        loss = model.test_on_batch(x, y, sample_weight, return_dict=True)["loss"]
        model.reset_metrics()
        total, count = total + float(loss) * size, count + size
    return total / count
