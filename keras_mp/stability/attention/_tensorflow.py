"""Attention on TensorFlow, where Keras's is right on every chip."""

from contextlib import AbstractContextManager, nullcontext


def attention_as_asked() -> AbstractContextManager[list[str]]:
    """A scope that does nothing."""
    return nullcontext([])
