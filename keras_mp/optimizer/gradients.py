"""The gradients of a step, before an optimizer takes them: checked, unscaled, summed, measured.

A list of gradients has one for each variable: a tensor, on TensorFlow also a sparse one, or None.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.rebuild.walk import is_overwritten

engine = backend.engine_of(__package__)


def at_least_float32(dtype: Any) -> str:
    """Returns the dtype of sums: float32 for 16 bits."""
    dtype = keras.backend.standardize_dtype(dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def sum_repeated_rows(grads: list[Any]) -> list[Any]:
    """Sums repeated rows of sparse gradients, before overflows are sought."""
    return [gradient if gradient is None else engine.sum_repeated_rows(gradient) for gradient in as_tensors(grads)]


def as_tensors(grads: list[Any]) -> list[Any]:
    """Gradients, those of NumPy as tensors."""
    return [ops.convert_to_tensor(g) if isinstance(g, (np.ndarray, np.generic)) else g for g in grads]


def all_finite(grads: list[Any]) -> Any:
    """Tells whether every value is finite, on this replica."""
    values = [backend.values_of(gradient) for gradient in as_tensors(grads) if gradient is not None]
    return engine.all_finite(values) if values else ops.convert_to_tensor(True)


def is_finite(gradient: Any) -> Any:
    """Tells whether a gradient is finite, in one boolean tensor."""
    return ops.all(ops.isfinite(backend.values_of(gradient)))


def multiply(factors: tuple[list[Any], Any], variables: list[keras.Variable]) -> list[Any]:
    """Multiplies gradients by a number, in float32 or more.

    Values that overwrite a variable are left as they are.

    Args:
        factors: the gradients, and a tensor of shape (), or None for 1.
    """
    grads, factor = factors

    def product(values: Any) -> Any:
        values = ops.cast(values, at_least_float32(values.dtype))
        return values if factor is None else values * ops.cast(factor, values.dtype)

    return [
        gradient if gradient is None or is_overwritten(variable) else backend.map_values(product, gradient)
        for gradient, variable in zip(grads, variables, strict=True)
    ]


def sum_over_replicas(grads: list[Any], variables: list[keras.Variable]) -> list[Any]:
    """Sums gradients over replicas; of overwriting values, the largest."""
    own = _without_overwritten(grads, variables)
    dtype = engine.reduce_dtype()
    narrow = [
        gradient if dtype == "float32" else backend.map_values(partial(ops.cast, dtype=dtype), gradient)
        for gradient in own
    ]
    summed = iter(
        backend.map_values(partial(ops.cast, dtype=backend.values_of(gradient).dtype), total)
        for gradient, total in zip(own, engine.sum_over_replicas(narrow), strict=True)
    )
    return [
        None if gradient is None else engine.max_over_replicas(gradient) if is_overwritten(variable) else next(summed)
        for gradient, variable in zip(grads, variables, strict=True)
    ]


def norm(grads: list[Any], variables: list[keras.Variable]) -> Any:
    """Computes the L2 norm over all gradients, a float32 scalar."""
    return ops.sqrt(sum(map(sum_of_squares, _without_overwritten(grads, variables))))


def finite_norm(grads: list[Any], variables: list[keras.Variable]) -> Any:
    """Computes the L2 norm over finite gradients, a float32 scalar."""
    squares = [ops.where(is_finite(g), sum_of_squares(g), 0.0) for g in _without_overwritten(grads, variables)]
    return ops.sqrt(sum(squares))


def sum_of_squares(gradient: Any) -> Any:
    """Computes a gradient's squared L2 norm, a float32 scalar."""
    return ops.sum(ops.square(ops.cast(backend.values_of(gradient), "float32")))


def share_below(threshold: Any, grads: list[Any], variables: list[keras.Variable]) -> Any:
    """Computes the share of nonzero values below a threshold."""
    values = [backend.values_of(gradient) for gradient in _without_overwritten(grads, variables)]
    magnitudes = [ops.abs(ops.cast(value, "float32")) for value in values]
    nonzero = sum(ops.sum(ops.cast(magnitude > 0, "float32")) for magnitude in magnitudes)
    below = sum(
        ops.sum(ops.cast(ops.logical_and(magnitude > 0, magnitude < threshold), "float32")) for magnitude in magnitudes
    )
    return below / ops.maximum(nonzero, 1.0)


def _without_overwritten(grads: list[Any], variables: list[keras.Variable]) -> list[Any]:
    pairs = zip(grads, variables, strict=True)
    return [gradient for gradient, variable in pairs if gradient is not None and not is_overwritten(variable)]


# Gradient accumulation: the sum of the gradients of the micro-batches so far, one for each variable.


def empty_sums(variables: list[keras.Variable]) -> list[Any]:
    """Creates the sums, all zero, in float32 or more."""
    return [
        # "on_read": each replica has a sum of its own, and a checkpoint holds that of all.
        keras.Variable(
            "zeros",
            shape=variable.shape,
            dtype=at_least_float32(variable.dtype),
            trainable=False,
            autocast=False,
            aggregation="sum",
            synchronization="on_read",
            layout=getattr(variable, "_layout", None),
            name=f"{variable.path.replace('/', '_')}_gradient_sum",
        )
        for variable in variables
    ]


def add_to_sums(grads: list[Any], sums: list[Any], variables: list[keras.Variable], is_first: Any) -> None:
    """Adds a micro-batch; of overwriting values, keeps the largest.

    Args:
        grads: a gradient for each variable, or None; dense.
        is_first: a boolean tensor of shape (): whether the sums begin with this micro-batch.
    """
    for new, total, variable in zip(grads, sums, variables, strict=True):
        # Zero here, where it is part of the sum: to reset after an update, XLA would copy the sums first.
        before = ops.where(is_first, ops.zeros((), total.dtype), ops.convert_to_tensor(total))
        add = ops.maximum if is_overwritten(variable) else ops.add
        total.assign(before if new is None else add(new, before))


def means_of(sums: list[Any], grads: list[Any], variables: list[keras.Variable], steps: int) -> list[Any]:
    """Takes the mean over micro-batches; of overwriting values, the largest.

    Args:
        grads: the gradients of the last micro-batch, of which None says that a variable has none.
    """
    return [
        None if gradient is None else ops.convert_to_tensor(total) / (1 if is_overwritten(variable) else steps)
        for total, gradient, variable in zip(sums, grads, variables, strict=True)
    ]
