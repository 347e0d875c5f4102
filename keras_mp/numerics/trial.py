"""A model under a mix of precisions, run beside float32."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.fp8.convert import convert
from keras_mp.numerics.nonfinite import first_nonfinite
from keras_mp.numerics.plain_step import explained, loss_of
from keras_mp.rebuild.notes import original_class
from keras_mp.rebuild.quantized_policies import policy_of, with_source
from keras_mp.rebuild.walk import children_of, layers_below, layers_by_path
from keras_mp.system.packages import package_of
from keras_mp.training.revert import revert

engine = backend.engine_of(__package__)
attention = backend.engine_of("keras_mp.stability.attention")

# A weight whose gradient is a smaller part of the whole is not missed where it vanishes: it may be rounding itself.
_NEGLIGIBLE = 1e-6


class Assignment(NamedTuple):
    """Which precision each layer has."""

    base: str  # the precision of what is not named: "float32", "mixed_float16" or "mixed_bfloat16"
    units: Mapping[str, str]  # other precisions, by path of `units_of`
    fp8: frozenset[str]  # paths of the Dense and EinsumDense layers in FP8
    # names of the classes of `class_name` whose layers have one precision with all that is inside
    closed: frozenset[str] = frozenset()

    def precision(self, path: str) -> str:
        """The precision of a unit."""
        return self.units.get(path, self.base)


class Errors(NamedTuple):
    """The errors of a mix of precisions, relative to float32."""

    loss: float  # the relative difference of the loss, the largest of the batches
    # the size of the difference of all gradients, as a share of the size of the gradients; infinite where one is not
    # finite or has vanished whole
    gradients: float
    nonfinite: str = ""  # path of the layer where the first value that is not finite came up, or ""

    @property
    def worst(self) -> float:
        """The larger of the two; infinite where it is unknown."""
        worst = max(self.loss, self.gradients)
        return worst if math.isfinite(worst) else math.inf


class CannotMixError(Exception):
    """A layer whose code fails with other precisions inside.

    Attributes:
        name: the name of the layer's class, as `class_name` gives it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot compute in one precision and the layers inside in another")
        self.name = name


def class_name(layer: keras.layers.Layer) -> str:
    """Module and name of a layer's class, without treatments."""
    own = original_class(layer)
    return f"{own.__module__}.{own.__qualname__}"


def units_of(model: keras.Model, closed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Layers that have a precision of their own, by path.

    What is inside one of Keras's own composite layers, such as MultiHeadAttention, goes with it.

    Args:
        closed: classes of custom layers, by `class_name`, whose layers have one precision with all that is inside.
    """
    units: dict[str, Any] = {}
    parents: list[str] = []
    for path, layer in layers_by_path(model).items():
        if any(path.startswith(f"{parent}/") for parent in parents):
            continue
        if isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            continue
        units[path] = layer
        if is_closed(layer, closed):
            parents.append(path)
    return units


def unit_of(path: str, units: Mapping[str, Any]) -> str:
    """Path of the unit that a layer goes with."""
    while path and path not in units:
        path = path.rpartition("/")[0]
    return path


def is_closed(layer: keras.layers.Layer, closed: frozenset[str] = frozenset()) -> bool:
    """Whether what is inside goes with the layer."""
    of_keras = package_of(original_class(layer)) == "keras"
    return (of_keras or class_name(layer) in closed) and bool(children_of(layer))


def members_of(layer: keras.layers.Layer, closed: frozenset[str]) -> list[Any]:
    """A unit's layer, and those inside that go with it."""
    return [layer, *(layers_below(layer) if is_closed(layer, closed) else ())]


def set_policies(model: keras.Model, assignment: Assignment) -> None:
    """Gives a model's layers their policies, in place; FP8 apart."""
    for path, layer in units_of(model, assignment.closed).items():
        precision = assignment.precision(path)
        for member in members_of(layer, assignment.closed):
            member.dtype_policy = with_source(policy_of(member), precision)


class Judge:
    """Compares a model under mixes of precisions with float32.

    Args:
        model: a built model with a loss, within `in_float32`.
        loss_scale: the number that the loss is multiplied by where a layer computes in float16.
    """

    def __init__(self, model: keras.Model, batches: Sequence[tuple], loss_scale: float) -> None:
        self._batches, self._scale = list(batches), loss_scale
        self._model = model
        self._reference = self._steps(1.0)

    def errors(self, assignment: Assignment) -> Errors:
        """Runs the model under an assignment, and compares.

        Raises:
            CannotMixError: a custom layer's own code fails, and a layer inside computes in another precision than it.
        """
        model = self._model
        with _assigned(model, assignment):
            scale = self._scale if "mixed_float16" in {assignment.base, *assignment.units.values()} else 1.0
            steps = self._steps(scale)
            errors = [_compared(low, high) for low, high in zip(steps, self._reference, strict=True)]
            worst = Errors(max(error.loss for error in errors), max(error.gradients for error in errors))
            if math.isfinite(worst.worst):
                return worst
            place = next(i for i, error in enumerate(errors) if not math.isfinite(error.worst))
            nonfinite = first_nonfinite(model, self._batches[place], scale)
            return worst._replace(nonfinite=nonfinite.path if nonfinite is not None else "")

    def _steps(self, scale: float) -> list[tuple[float, list[np.ndarray]]]:
        run = _gradient_step(self._model)
        results = [run(batch, scale) for batch in self._batches]
        return [(loss, [gradient / scale for gradient in gradients]) for loss, gradients in results]


def _gradient_step(model: keras.Model) -> Callable[[tuple, float], tuple[float, list[np.ndarray]]]:
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    failed: list[str] = []

    def noting(path: str, layer: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                failed.append(path)  # the innermost first
                raise

        return call

    def forward(tap: Any, batch: Any) -> tuple[Any, list[Any]]:
        (x, y, sample_weight), scale = (*batch[0], None, None)[:3], batch[1]
        failed.clear()
        with attention.attention_as_asked(), wrapped_methods(layers_by_path(model).items(), ("call",), noting):
            loss = loss_of(model, x, y, sample_weight)
        return loss * scale, [loss]

    def finish(loss: Any, kept: list[Any], gradients: list[Any], tapped: list[Any]) -> Any:
        zeros = [keras.ops.zeros(shape) for shape in shapes]
        return kept[0], [zero if g is None else g for g, zero in zip(gradients, zeros, strict=True)]

    step = engine.observed_step(model, forward, finish)

    def run(batch: tuple, scale: float) -> tuple[float, list[np.ndarray]]:
        given = tuple(part for part in batch if part is not None)
        try:
            loss, gradients = step((given, np.float32(scale)))
        except engine.step_errors() as error:
            mixing = _mixing(model, failed)
            if mixing is not None:
                raise CannotMixError(class_name(mixing)) from error
            raise explained(model, batch, error) from error
        return float(loss), [np.asarray(keras.ops.cast(gradient, "float32")) for gradient in gradients]

    return run


def _mixing(model: keras.Model, failed: Sequence[str]) -> Any:
    """The innermost custom layer with another precision inside."""
    layers = layers_by_path(model)
    for path in failed:
        layer = layers[path]
        inside = {member.compute_dtype for member in layers_below(layer)}
        if inside - {layer.compute_dtype} and not isinstance(layer, keras.Model) and not is_closed(layer):
            return layer
    return None


def _compared(low: tuple[float, list[np.ndarray]], high: tuple[float, list[np.ndarray]]) -> Errors:
    loss = abs(low[0] - high[0]) / max(abs(high[0]), float(np.finfo("float32").tiny))
    squares = [float(np.square(gradient, dtype="float64").sum()) for gradient in high[1]]
    whole = sum(squares)
    difference = 0.0
    for mine, theirs, square in zip(low[1], high[1], squares, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            difference += float(np.square(mine.astype("float64") - theirs).sum())
        if square > _NEGLIGIBLE**2 * whole and not mine.any():
            difference = math.inf
    if not math.isfinite(loss) or not math.isfinite(difference):
        return Errors(loss if math.isfinite(loss) else math.inf, math.inf)
    return Errors(loss, math.sqrt(difference / whole) if whole else math.sqrt(difference))


@contextmanager
def _assigned(model: keras.Model, assignment: Assignment) -> Any:
    before = [(layer, layer.dtype_policy) for layer in layers_by_path(model).values()]
    set_policies(model, assignment)
    try:
        if assignment.fp8:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*compute in float32.*")
                convert(model, select=lambda path, layer: path in assignment.fp8)
        yield
    finally:
        if assignment.fp8:
            revert(model, "convert")
        for layer, policy in before:
            layer.dtype_policy = policy
