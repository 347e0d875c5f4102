"""How XLA compiles a step for a CPU, and the plain forms of TensorFlow's islands: here a step is one program."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import jax

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.devices import traced_chip
from keras_mp.backend.jax.transforms import unmerged

# In bfloat16 XLA leaves the gradient of a Dense kernel to a loop, measured 12 times as slow as oneDNN's product (jax
# 0.12.0.1, Zen 4). Without the second option oneDNN would compute softmax, too, which hides NaN: in a row of scores
# with one, all others become finite. Without the third, products would skip roundings to bfloat16, some in one program
# and others in another, so that a base in 16 bits would no longer give the bits of one in float32.
_ONEDNN = {
    "xla_cpu_experimental_onednn_custom_call": True,
    "xla_disable_hlo_passes": "onednn-ops-rewriter",
    "xla_allow_excess_precision": False,
}


def bfloat16_options() -> Mapping[str, Any]:
    """The options with which XLA compiles bfloat16 products for this machine's CPU to fast ones; empty before jax 0.12.

    On jax 0.10.2 they change nothing. They are experimental: a later compiler that does not know them is not asked.
    """
    return _known_options() if traced_chip().platform == "cpu" else {}


@cache
def _known_options() -> Mapping[str, Any]:
    if jax.__version_info__ < (0, 12):
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_ONEDNN).lower(0.0).compile()
    except (ValueError, jax.errors.JaxRuntimeError):
        return {}
    return _ONEDNN


@contextmanager
def steps_compiled_with(options: Mapping[str, Any]) -> Iterator[None]:
    """A scope in which Keras makes a model's functions of a step such that XLA compiles them with these options."""

    def with_options(jit: Any) -> Any:
        return partial(jit, compiler_options=dict(options)) if jit is jax.jit else jit  # Flax's takes none

    with patched({"keras.src.backend.jax.trainer.jit": with_options} if options else {}):
        yield


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
    return unmerged(x)


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
