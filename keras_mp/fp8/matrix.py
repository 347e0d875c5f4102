"""An operand of a product as a matrix, one of whose axes the product sums over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras


def as_matrix(x: Any, summed: Sequence[int]) -> tuple[Any, int]:
    """Makes one axis of those that a product sums over, and one of the others.

    It is a reshape where the product sums over the first axes or over the last ones.

    Args:
        x: a tensor; on TensorFlow, sizes may be unknown, of one of the two groups of axes.
        summed: axes, in the order that the product's other operand has, too.

    Returns:
        A tensor of two axes, and which of them, 0 or 1, the product sums over.
    """
    groups = _groups(len(x.shape), summed)
    order = groups[0] + groups[1]
    if order != sorted(order):
        x = keras.ops.transpose(x, order)
    sizes = [[x.shape[order.index(axis)] for axis in group] for group in groups]
    matrix = keras.ops.reshape(x, [-1 if None in group else math.prod(group) for group in sizes])
    return matrix, groups.index(list(summed))


def from_matrix(matrix: Any, shape: Sequence[Any], summed: Sequence[int]) -> Any:
    """Undoes `as_matrix` for a tensor of this shape."""
    order = sum(_groups(len(shape), summed), [])
    x = keras.ops.reshape(matrix, [shape[axis] for axis in order])
    return x if order == sorted(order) else keras.ops.transpose(x, [order.index(axis) for axis in range(len(order))])


def _groups(rank: int, summed: Sequence[int]) -> list[list[int]]:
    """The axes that are summed over and the others, those first that stand first."""
    kept = [axis for axis in range(rank) if axis not in summed]
    return [list(summed), kept] if list(summed) == list(range(len(summed))) else [kept, list(summed)]
