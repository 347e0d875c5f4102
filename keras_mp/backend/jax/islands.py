"""Islands of jitted code, which JAX has none of: its step is one program."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def has_islands() -> bool:
    """Returns False."""
    return False


@contextmanager
def without_islands() -> Iterator[None]:
    """A scope that does nothing."""
    yield


def update_in_one_program(
    update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool, beside: Any
) -> None:
    """Calls a function with gradients."""
    del keeps_rows, beside
    update(gradients)


@contextmanager
def gradients_on_cpus() -> Iterator[None]:
    """A scope that does nothing: XLA sums in float32, and chooses how it computes a convolution."""
    yield


@contextmanager
def activations_on_cpus(gelu: Callable[[Any, bool], Any]) -> Iterator[None]:
    """A scope that does nothing."""
    del gelu
    yield


def count_batch_sizes() -> Callable[[Any], AbstractContextManager[None]]:
    """A function of a batch that returns a scope, which does nothing: each batch size is a step of its own."""
    return nullcontext
