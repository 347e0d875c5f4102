"""The vocabulary of a subclassed model: the layer whose result `call` returns, and the loss from its input."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import keras

from keras_mp.lean.chunked_head import (
    HEADS,
    Calls,
    ChunkedLoss,
    calls_behind,
    forget_calls,
    note_calls,
    own_code,
    why_not_compiled,
    why_not_plain,
)
from keras_mp.rebuild import layers_below
from keras_mp.rebuild.notes import original_class, treatments_of
from keras_mp.rebuild.traced_call import trace_call
from keras_mp.rebuild.walk import graph_of
from keras_mp.treatment.treated import Treatment, register_treatments, see_to

CALLED_HEAD, NOTED_HEAD = "lean head of call", "lean noted head"
_NOTES: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("notes", default=None)


class CalledHead(ChunkedLoss):
    """A subclassed model that computes a sparse cross-entropy from the input of the layer that makes the logits.

    Which call of the layer made the logits is known only where the model returns that very tensor; else the loss is
    computed as it was.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        see_to(self)
        if self.chunked_loss() is None:
            return super().call(*args, **kwargs)  # type: ignore[misc]
        before = _NOTES.set([])
        try:
            logits = super().call(*args, **kwargs)  # type: ignore[misc]
            for features, made in _NOTES.get() or ():
                if made is logits:
                    self._calls.note(features, logits)
            return logits
        finally:
            _NOTES.reset(before)


class NotedHead:
    """A layer that makes logits, and notes from what."""

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        notes = _NOTES.get()
        if notes is not None:
            notes.append((inputs, outputs))
        return outputs


class Found(NamedTuple):
    """The layer that makes a model's logits.

    Attributes:
        head: the layer.
        width: the number of features of its input.
        shape: the shape of the logits.
    """

    head: keras.layers.Layer
    width: int
    shape: tuple[int | None, ...]


def find_called_head(model: Any) -> Found | None:
    """The layer whose result a subclassed model returns as it is; None where there is none, or where it cannot be seen.

    The model is traced by the shapes that it was built for.
    """
    if not isinstance(model, keras.Model) or graph_of(model) is not None or not model.built:
        return None
    heads = [layer for layer in layers_below(model) if isinstance(layer, HEADS)]
    traced = trace_call(model, heads) if heads else None
    for call in traced.makers(traced.outputs) if traced else ():
        return Found(call.layer, call.inputs.shape[-1], tuple(call.outputs.shape))
    return None


def why_not_called_head(model: Any) -> tuple[Any, str]:
    """The answer of `why_not_head` for a subclassed model."""
    called = find_called_head(model)
    if called is None or len(called.shape) < 3 or not called.width < (called.shape[-1] or 0):
        return None, ""
    reason = why_not_plain(called.head) or own_code(original_class(model), ("compute_loss", "compute_metrics"))
    return called.head, reason or why_not_compiled(model)


def _note_head(model: Any) -> None:
    head = next((layer for layer in layers_below(model) if NOTED_HEAD in treatments_of(layer)), None)
    calls = calls_behind(model)
    if head is not None and (calls is None or calls.head is not head):
        note_calls(model, Calls(head))


register_treatments(
    {
        CALLED_HEAD: Treatment(lambda original, names: CalledHead, undo=forget_calls, before_call=_note_head, order=-1),
        NOTED_HEAD: Treatment(lambda original, names: NotedHead, order=-1),
    }
)
