"""Whether the code that is running now belongs to a training step."""

from __future__ import annotations

from typing import Any

# Private, because a layer whose `call()` has no argument `training` has no public way to know.
from keras.src.backend.common import global_state


def is_training(given: Any = None) -> bool:
    """Whether the layers that are called now train.

    Args:
        given: what the layer was told; None where it was told nothing.
    """
    if given is None:
        context = global_state.get_global_attribute("current_call_ctx")
        given = getattr(context, "training", None)
    # A tensor cannot say before the step runs.
    return given if isinstance(given, bool) else False
