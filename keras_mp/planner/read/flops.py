"""Counts the floating-point operations of dots and convolutions; a multiply-add is two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def dot_flops(result: Sequence[int], contracted: Sequence[int]) -> int:
    """Counts the operations of a dot.

    Args:
        result: dimensions of the result, batch dimensions included.
        contracted: the sizes of the dimensions that are summed over.
    """
    return 2 * math.prod(result) * math.prod(contracted)


def convolution_flops(
    result: Sequence[int], kernel_inputs: int, windows: Sequence[tuple[int, int, int, int, int, int, int]]
) -> int:
    """Counts a convolution's operations, without those of padding and holes.

    Args:
        result: sizes of the result that are not spatial: its batch and its features.
        kernel_inputs: input features that one output feature sums over.
        windows: a tuple for each spatial dimension: (input, kernel, output, stride, padding before, dilation of the
            input, dilation of the kernel).
    """
    return 2 * math.prod(result) * kernel_inputs * math.prod(_products(*window) for window in windows)


def _products(
    size: int, kernel: int, output: int, stride: int, padding: int, dilation: int, kernel_dilation: int
) -> int:
    positions = np.arange(output)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilation - padding
    inside = (positions >= 0) & (positions <= (size - 1) * dilation) & (positions % dilation == 0)
    return int(inside.sum())
