"""Keras's attention, which on a TPU is another, made right."""

from __future__ import annotations

from typing import Any

from keras_mp import backend
from keras_mp.rebuild.walk import notes_of

engine = backend.engine_of(__package__)

ATTENTION = "attention"


class AttentionAsAsked:
    """Attends on a TPU with the mask and scale given."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with engine.attention_as_asked() as used:
            result = super().call(*args, **kwargs)  # type: ignore[misc]
        if used and (notes := notes_of(self)) is not None:
            notes.kept[ATTENTION] = ", ".join(dict.fromkeys(used))
        return result
