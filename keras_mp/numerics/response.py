"""How far each layer's result moves in 16 bits.

A layer of Keras's own computes in float32, from what is rounded, for `stabilize` knows what inside it needs float32. A
layer whose code is its user's, or another library's, computes in the precision itself, as do the operations between the
layers of a subclassed model. A layer inside is not run again with it: it returns what it returned in float32, rounded,
and its arguments are compared as a result is, so that each layer answers for its own code alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.backend.common.keras_private import AutocastScope, get_keras_mask, set_keras_mask
from keras_mp.numerics.nonfinite_origin import Tap
from keras_mp.numerics.observe import layers_and_operations
from keras_mp.numerics.plain_step import given_of, loss_of
from keras_mp.numerics.verdict import PASSING
from keras_mp.precision.formats import format_named
from keras_mp.rebuild.quantized_policies import policy_of, with_source
from keras_mp.rebuild.walk import (
    LIBRARIES,
    has_no_call,
    layers_below,
    notes_of,
    original_class,
    own_variables,
    package_of,
)
from keras_mp.reporting.text import error_line
from keras_mp.stability.float32_layers import has_float_dtype

engine = backend.engine_of(__package__)

PRECISIONS = ("float16", "bfloat16")
# A sum of what comes in may be the difference of large numbers.
_PASSING = set(PASSING) - {"Add", "Average"}
Responses = dict[str, dict[str, float | str]]


class _Inner(NamedTuple):
    """A call in float32 of a layer inside."""

    layer: Any
    given: Any
    result: Any


@dataclass
class _Call:
    """A call that is being made in float32."""

    rounds: bool  # whether its code hands rounded arguments on
    inner: list[_Inner] = field(default_factory=list)  # the calls that its code makes
    hidden: bool = False  # whether one is in the body of a loop or of a branch, whose tensors cannot be used outside


def responses(model: keras.Model, batch: tuple, kept: set[int]) -> Responses:
    """Runs each layer and operation on rounded arguments and weights.

    Args:
        model: a model within `in_float32`.
        batch: `(x, y, sample_weight)`, as `ObservedStep` takes it, which the model's step was run on.
        kept: ids of layers that stay in float32, of which only the arguments are rounded, where a layer before or
            around them is not.

    Returns:
        For each path, and "float16" and "bfloat16", the largest error of a result, by size, as a share of the size of
        the result in float32; infinite where it is not finite. A sentence where the layer could not be tried.
    """
    try:
        return _measured(model, batch, kept, own_code=True)
    except engine.STEP_ERRORS as error:
        # Its code has an operation that this backend does not have in 16 bits, which shows as the step runs.
        reason = error_line(error)
        own: Responses = {
            path: dict.fromkeys(PRECISIONS, reason)
            for path, layer in _with_model(model).items()
            if _has_own_code(layer)
        }
        return _measured(model, batch, kept, own_code=False) | own


def _measured(model: keras.Model, batch: tuple, kept: set[int], *, own_code: bool) -> Responses:
    runs: list[_Runs] = []

    def forward(tap: Tap, given: tuple) -> tuple[Any, list[Any]]:
        runs.append(_Runs(tap, kept, own_code, given[0]))
        with wrapped_methods(_with_model(model).items(), ("call", "quantized_call"), runs[-1].wrap):
            loss_of(model, given)
        return ops.zeros(()), [ops.stack([ops.zeros(()), *runs[-1].errors])]

    step = engine.observed_step(model, forward, lambda loss, errors, gradients, tapped: errors)
    (errors,) = step(given_of(batch))
    measured: Responses = {}
    for (path, precision), error in zip(runs[-1].names, np.asarray(errors)[1:].tolist(), strict=True):
        worst = measured.setdefault(path, {}).get(precision, 0.0)
        measured[path][precision] = max(worst, math.inf if math.isnan(error) else error)
    for (path, precision), reason in runs[-1].untried.items():
        measured.setdefault(path, {})[precision] = reason
    return measured


def _with_model(model: keras.Model) -> dict[str, Any]:
    return {"": model, **layers_and_operations(model)}


def _has_own_code(layer: Any) -> bool:
    """Whether `call()` is neither Keras's nor the kit's."""
    if not isinstance(layer, keras.layers.Layer) or has_no_call(layer):
        return False
    definer = next(base for base in original_class(layer).__mro__ if "call" in vars(base))
    return package_of(definer) not in LIBRARIES


class _Runs:
    """The calls of a forward pass, each made again, rounded."""

    def __init__(self, tap: Tap, kept: set[int], own_code: bool, data: Any) -> None:
        self.names: list[tuple[str, str]] = []  # path and precision of each error
        self.errors: list[Any] = []  # scalars, float32
        self.untried: dict[tuple[str, str], str] = {}  # why a call could not be made again, by path and precision
        self._tap, self._kept, self._own_code = tap, kept, own_code
        # Tensors that are float32 in any precision, by id: the data, and what operations of a graph make of it.
        self._wide = {id(x): x for x in _tensors(data)}
        self._open: list[_Call] = []
        # The call that is made again: its path, its precision, what it computes in, and the calls inside that are still
        # to come; these are None where they cannot be replayed, and so run.
        self._again: tuple[str, str, str, Iterator[_Inner] | None] | None = None

    def wrap(self, path: str, layer: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own = _has_own_code(layer)
        stays = id(layer) in self._kept
        casts = not stays and getattr(layer, "autocast", False)
        tried = self._own_code or not own
        tried &= own or not isinstance(layer, keras.Model) and type(layer).__name__ not in _PASSING
        draws = any("seed_generator_state" in v.name for v in own_variables(layer)) if own else False
        counters = [v for v in getattr(layer, "variables", []) if not has_float_dtype(v)] if tried else []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._again is not None:
                return self._replayed(layer, function, args, kwargs)
            state = [(v, ops.convert_to_tensor(v.value)) for v in counters]
            self._open.append(made := _Call(own and casts))
            try:
                result = function(*args, **kwargs)
            finally:
                self._open.pop()
            operates = not isinstance(layer, keras.layers.Layer) and all(
                id(x) in self._wide for x in _tensors((args, kwargs)) if has_float_dtype(x)
            )
            if operates or stays and notes_of(layer) is None:
                self._wide |= {id(x): x for x in _tensors(result)}
            tensors = _tensors((args, kwargs, result))
            seen = all(self._tap(x, False) is not None for x in tensors)
            if self._open:
                self._open[-1].inner.append(_Inner(layer, (args, kwargs), result))
                self._open[-1].hidden |= not seen
            for precision in PRECISIONS if tried and seen and any(map(has_float_dtype, tensors)) else ():
                inner = None if made.hidden or not made.inner else iter(made.inner)
                dtype = precision if own and not stays and not draws else "float32"
                given = keras.tree.map_structure(self._rounding(casts, dtype, precision), (args, kwargs))
                self._again = path, precision, dtype, inner
                try:
                    with _in_precision(layer, dtype, "float32" if stays else precision, self._kept, state):
                        self._compare(result, function(*given[0], **given[1]))
                except Exception as error:  # whatever code makes of a precision that it was not written for
                    self.untried[path, precision] = error_line(error)
                finally:
                    self._again = None
            return result

        return call

    def _rounding(self, casts: bool, dtype: str, precision: str) -> Callable[[Any], Any]:
        """Rounds an argument that this layer or another rounds."""
        wide = {} if casts or any(made.rounds for made in self._open) else self._wide
        return lambda x: x if id(x) in wide else _cast(dtype if casts else "float32", precision, x)

    def _replayed(self, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._again is not None
        _, precision, dtype, inner = self._again
        if inner is None:
            return function(*args, **kwargs)
        made = next(inner, None)
        if made is None or made.layer is not layer:
            raise ValueError("its code calls other layers than in float32")
        self._compare(made.given, (args, kwargs))
        if id(layer) in self._kept and notes_of(layer) is None:
            return made.result
        return keras.tree.map_structure(functools.partial(_cast, dtype, precision), made.result)

    def _compare(self, expected: Any, got: Any) -> None:
        assert self._again is not None
        for wide, low in zip(_tensors(expected), _tensors(got), strict=True):
            if 0 not in wide.shape:
                self.names.append(self._again[:2])
                self.errors.append(_error(wide, low))


@contextmanager
def _in_precision(
    layer: Any, dtype: str, precision: str, kept: set[int], state: list[tuple[Any, Any]]
) -> Iterator[None]:
    """Lets a layer compute in a dtype from rounded weights."""
    # It assigns nothing; `state` has the values of what counts, such as seeds, before the call.
    parts = [] if dtype == "float32" else [part for part in (layer, *layers_below(layer)) if id(part) not in kept]
    before = [(part, part._dtype_policy) for part in parts]
    of_layer = getattr(layer, "variables", [])
    values = {id(v): (v, _cast("float32", precision, v.value) if v._autocast else v.value) for v in of_layer}
    values |= {id(v): (v, value) for v, value in state}
    try:
        for part in parts:
            part._dtype_policy = with_source(policy_of(part), f"mixed_{precision}")  # as in to_compute_in_float32
        with (
            keras.StatelessScope(list(values.values())),
            AutocastScope(dtype if getattr(layer, "autocast", False) else None),
        ):
            yield
    finally:
        for part, policy in before:
            part._dtype_policy = policy


def _cast(dtype: str, precision: str, x: Any) -> Any:
    """A float tensor rounded to a precision, in a dtype."""
    # Numbers past the largest become that: their ranges say that they overflow.
    if precision == "float32" or not has_float_dtype(x):
        return x
    most = format_named(precision).max

    def rounded(x: Any) -> Any:
        return ops.cast(ops.cast(ops.where(ops.isfinite(x), ops.clip(x, -most, most), x), precision), dtype)

    y = backend.map_values(rounded, x)
    if get_keras_mask(x) is not None:
        set_keras_mask(y, get_keras_mask(x))
    return y


def _error(wide: Any, low: Any) -> Any:
    """The size of a difference, relative to the first's."""
    # Of whole numbers the share that differs; what is not finite in the first is left out.
    if not has_float_dtype(wide):
        return ops.mean(ops.cast(ops.not_equal(wide, ops.cast(low, wide.dtype)), "float32"))
    wide, low = ops.cast(wide, "float32"), ops.cast(low, "float32")
    finite = ops.isfinite(wide)
    wide, low = ops.where(finite, wide, 0.0), ops.where(finite, low, 0.0)
    largest = ops.max(ops.abs(wide))
    unit = ops.where(largest > 0, largest, 1.0)
    noise, signal = ops.sum(ops.square((low - wide) / unit)), ops.sum(ops.square(wide / unit))
    return ops.where(largest > 0, ops.sqrt(noise / ops.maximum(signal, 1.0)), 0.0)


def _tensors(structure: Any) -> list[Any]:
    """The tensors in a structure, of sparse ones the values."""
    leaves = map(backend.values_of, keras.tree.flatten(structure))
    return [x for x in leaves if ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) != "string"]
