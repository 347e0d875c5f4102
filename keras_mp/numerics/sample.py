"""A sample of a tensor's values that is spread over every axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def stride_of(shape: Sequence[int], most: int | None) -> int:
    """The step with which to walk the flat tensor for a sample of at most `most` values.

    It has no divisor in common with any size of the shape, so that no channel, row or record is left out.

    Args:
        shape: of the tensor.
        most: the largest sample; None takes every value.
    """
    size = math.prod(shape)
    if most is None or size <= most:
        return 1
    stride = -(-size // most)
    while any(math.gcd(stride, length) > 1 for length in shape):
        stride += 1
    return stride


def sampled(x: Any, most: int | None, flatten: Any) -> Any:
    """The sample, flat.

    Args:
        x: a tensor or an array.
        most: as for `stride_of`.
        flatten: makes it flat.
    """
    return flatten(x)[:: stride_of(tuple(x.shape), most)]
