"""The number of updates that a history counts, in float32."""

from __future__ import annotations

from typing import Any

import keras

# Float32 counts each step up to here; what follows counts in the upper half again, so that no two neighbours are equal.
_STEPS = 2.0**24


def next_step(steps: Any) -> Any:
    """Counts one more.

    Args:
        steps: float32 of any shape, whole numbers of 0 or more.

    Returns:
        float32 of the shape: steps + 1, and 2^23 after 2^24 - 1.
    """
    following = steps + 1.0
    return keras.ops.where(following < _STEPS, following, _STEPS / 2)
