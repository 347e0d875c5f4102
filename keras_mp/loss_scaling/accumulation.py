"""Gradient accumulation: the sum of the gradients of the micro-batches so far, one for each variable."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_mp.loss_scaling.gradients import at_least_float32, is_overwritten


def empty_sums(variables: list[keras.Variable]) -> list[Any]:
    """Creates the sums, in float32 or more.

    Args:
        variables: the variables whose gradients are to be summed.

    Returns:
        A Keras variable for each, all zero.
    """
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


def add(grads: list[Any], sums: list[Any], variables: list[keras.Variable]) -> None:
    """Adds a micro-batch.

    Args:
        grads: a gradient for each variable, or None; dense.
        sums: the sum for each variable.
        variables: the variables.
    """
    for total, new in zip(sums, _added(grads, sums, variables), strict=True):
        if new is not None:
            total.assign(new)


def mean_and_reset(grads: list[Any], sums: list[Any], variables: list[keras.Variable], steps: int) -> list[Any]:
    """Adds the last micro-batch, takes the mean, and sets the sums to zero.

    Args:
        grads: a gradient for each variable, or None; dense.
        sums: the sum for each variable.
        variables: the variables.
        steps: how many micro-batches were accumulated.

    Returns:
        The mean gradients of the micro-batches.
    """
    means = [
        total if total is None or is_overwritten(variable) else total / steps
        for total, variable in zip(_added(grads, sums, variables), variables, strict=True)
    ]
    for total in sums:
        total.assign(ops.zeros(total.shape, total.dtype))
    return means


def _added(grads: list[Any], sums: list[Any], variables: list[keras.Variable]) -> list[Any]:
    """Adds gradients; values that overwrite a variable are combined by max, as Keras does."""
    return [
        None if new is None else (ops.maximum if is_overwritten(variable) else ops.add)(new, total)
        for new, total, variable in zip(grads, sums, variables, strict=True)
    ]
