"""Whether the code that is running now belongs to a training step."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# Private, because a layer whose `call()` has no argument `training` has no public way to know.
from keras.src.backend.common import global_state

STEP = "lean step"
_IN_STEP: ContextVar[bool] = ContextVar("in_step", default=False)


class LeanStep:
    """A model whose layers know that its training step runs, whether or not a `call()` tells them `training`."""

    def train_step(self, *arguments: Any) -> Any:
        before = _IN_STEP.set(True)
        try:
            return super().train_step(*arguments)  # type: ignore[misc]
        finally:
            _IN_STEP.reset(before)


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


def may_be_differentiated(given: Any = None) -> bool:
    """Whether the layers that are called now train, or belong to a training step in another phase.

    Keras tells the layers of a model nothing whose `call()` has no argument `training`, and they then compute as in
    inference; so do layers that are called with `training=False`. Gradients flow through them all the same.

    Args:
        given: what the layer was told; None where it was told nothing.
    """
    if given is not None and not isinstance(given, bool):
        return False  # a tensor, which cannot say before the step runs whether dropout is drawn
    return _IN_STEP.get() or is_training(given)
