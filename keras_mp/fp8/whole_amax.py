"""The largest magnitude of a tensor, also of one of which each device quantizes a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

_scaled: list[Any] = []


@contextmanager
def scaling(part: Any) -> Iterator[None]:
    """Within it a scaling recipe quantizes a part of a tensor."""
    _scaled.append(part)
    try:
        yield
    finally:
        _scaled.pop()


def over_parts(amax: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude of a whole tensor, from that of the part that is being quantized.

    Args:
        amax: float32, the largest magnitude along some axes.
        axes: these; None for all.
    """
    part = _scaled[-1] if _scaled else None
    return amax if part is None or not lies_in(part, axes) else part.largest(amax)


def amax_of(x: Any) -> Any:
    """The largest magnitude of a tensor, float32 of shape (); 0 where it is not finite, or the tensor is empty."""
    # Of float32 values, as they are scaled: so one pass can do both.
    amax = over_parts(keras.ops.max(keras.ops.abs(keras.ops.cast(x, "float32")), initial=0))
    return keras.ops.where(keras.ops.isfinite(amax), amax, keras.ops.zeros_like(amax))


def lies_in(part: Any, axes: tuple[int, ...] | None) -> bool:
    """Whether the axis that is split is one of these; None stands for all."""
    return axes is None or part.axis in [axis % len(part.shape) for axis in axes]
