"""The plain forms of what is an island on TensorFlow: here a step is one program, which XLA fuses as a whole."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from keras_mp.backend.jax.transforms import barrier


@contextmanager
def without_islands() -> Iterator[None]:
    """A scope that does nothing."""
    yield


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays as it is: whatever is jitted around it fuses it."""
    return function


def normalize_rows(
    plain: Callable[[Any], Any], x: Any, gamma: Any, beta: Any, epsilon: float, *, centered: bool, dtype: str
) -> Any:
    """Normalizes each row of x by the plain function."""
    del gamma, beta, epsilon, centered, dtype
    return plain(x)


def rows_at_once(rows: int, block: int, *, causal: bool) -> int:
    """How many rows of queries attention takes at once: as many as a block has."""
    del rows, causal
    return block


def computed_once(x: Any) -> Any:
    """Returns the same array, which many operations read, and whose own the compiler does not merge with theirs."""
    return barrier([x], [])[0]


def product_over_rows(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a product over rows as it is: the compiler rounds its sums where it writes them."""
    return plain


def update_in_one_program(
    update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool, beside: Any
) -> None:
    """Calls a function with gradients."""
    del keeps_rows, beside
    update(gradients)


def step_scopes(gelu: Callable[[Any, bool], Any]) -> Callable[[Any], AbstractContextManager[None]]:
    """A function of a step's batch that returns a scope, which does nothing."""
    del gelu
    return nullcontext
