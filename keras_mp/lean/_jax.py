"""JAX: the functions of `keras_mp.lean`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.devices import traced_chip
from keras_mp.backend.jax.gradients import as_result, jvp_where_moving, varying_alike, with_constants
from keras_mp.backend.jax.tensors import barrier, inside
from keras_mp.parallel._jax_part import AXIS
from keras_mp.stability.attention._jax import splash_attention


def unmerged(x: Any) -> Any:
    """Returns the same array, not merged with another computation."""
    return barrier([x], [])[0]


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that is recomputed in the backward pass.

    Args:
        function: a function from arrays to a tuple of arrays; it reads no variable and assigns to none.
    """
    kept = jax.checkpoint(function)
    return lambda *arguments: kept(*_together.bind(*arguments))


# Its results are its operands. All gradients of a recomputed part, those of its weights among them, are there before
# the backward pass goes on: XLA would put off what only an optimizer waits for, and keep what was recomputed for it.
_together = Primitive("keras_mp_together")
_together.multiple_results = True


def _as_they_are(*operands: Any) -> list[Any]:
    return list(operands)


def _together_differentiated(primals: Any, tangents: Any) -> Any:
    moving = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    moved = iter(_together.bind(*moving) if moving else ())
    results = _together.bind(*primals)
    return results, [x if isinstance(x, ad.Zero) else next(moved) for x in tangents]


def _together_transposed(upstream: Any, *operands: Any) -> list[Any]:
    del operands
    given = [x for x in upstream if not isinstance(x, ad.Zero)]
    waited = iter(jax.lax.optimization_barrier(given) if given else ())
    return [x if isinstance(x, ad.Zero) else next(waited) for x in upstream]


_together.def_impl(_as_they_are)
_together.def_abstract_eval(_as_they_are)
mlir.register_lowering(_together, mlir.lower_fun(_as_they_are, multiple_results=True))
ad.primitive_jvps[_together] = _together_differentiated
ad.primitive_transposes[_together] = _together_transposed
batching.primitive_batchers[_together] = lambda operands, axes: (_together.bind(*operands), axes)


def scan(
    step: Callable[..., Any], carry: list[Any], slices: list[Any], results: list[tuple[int, str]]
) -> tuple[list[Any], list[Any]]:
    """Calls a step for each slice, in one loop.

    Args:
        step: a function `step(carry, slices at i) -> (carry, results)`, which keeps the carry's shapes and dtypes.
        slices: arrays with the same first axis.
        results: the place of the slice that has the shape of a result, and its dtype, for each result of a step.

    Returns:
        The last carry, and the results stacked.
    """
    traced, shape = jax.make_jaxpr(lambda *given: jax.lax.scan(step, *given), return_shape=True)(carry, slices)
    operands = [*traced.consts, *jax.tree.leaves((carry, slices))]
    results = _loop.bind(*operands, jaxpr=traced.jaxpr, count=len(traced.consts))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


# A loop as one operation. Where JAX splits a loop into what is known and what is linear, it moves out of it what does
# not change, of which whole arrays of zeros are kept; within a custom gradient it does so without need.
_loop = Primitive("keras_mp_loop")
_loop.multiple_results = True


def _run(*operands: Any, jaxpr: Any, count: int) -> list[Any]:
    return list(with_constants(jaxpr, operands[:count])(*operands[count:]))


def _run_differentiated(primals: Any, tangents: Any, *, jaxpr: Any, count: int) -> Any:
    return jvp_where_moving(partial(_run, jaxpr=jaxpr, count=count), primals, tangents)


def _run_batched(operands: Any, axes: Any, *, jaxpr: Any, count: int) -> Any:
    results = jax.vmap(lambda *operands: _run(*operands, jaxpr=jaxpr, count=count), in_axes=tuple(axes))(*operands)
    return results, [0] * len(results)


_loop.def_impl(_run)
_loop.def_abstract_eval(lambda *operands, jaxpr, count: [variable.aval for variable in jaxpr.outvars])
mlir.register_lowering(_loop, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_loop] = _run_differentiated
batching.primitive_batchers[_loop] = _run_batched


def with_derivatives_of(formula: Callable[..., Any], values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Returns arrays that have the derivatives of a formula.

    Args:
        formula: a function from the arguments to the same arrays; called where they are differentiated.
    """

    # As operands also what the formula finds around it: it is called where that is gone.
    traced = jax.make_jaxpr(lambda *arguments: list(formula(*arguments)))(*arguments)

    def function(*operands: Any) -> Any:
        def of(*operands: Any) -> Any:
            return with_constants(traced.jaxpr, operands[: len(traced.consts)])(*operands[len(traced.consts) :])

        results, pull_back = jax.vjp(of, *operands)
        return results, lambda *upstream: pull_back(list(upstream))

    operands = varying_alike([*traced.consts, *arguments])
    return as_result.bind(*map(jax.lax.stop_gradient, values), *operands, function=function, count=len(values))


def add_at(x: Any, places: Any, rows: Any) -> Any:
    """Adds rows, rounded to x's dtype, to those at places."""
    return x.at[places].add(rows.astype(x.dtype))


def loss_outside(targets: Any, vocabulary: int) -> float:
    """Loss and gradients of a target outside a vocabulary: 0."""
    return 0.0


def fused_attention(
    query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float, mean_of_unseen: bool = False
) -> Any:
    """Attends with the chip's kernel; returns None where none serves.

    On a TPU that is Splash, on NVIDIA's GPUs cuDNN's. The mask has the shape `(batch or 1, heads or 1, rows or 1,
    columns)`; the rest is as `keras_mp.lean.attention` has it.
    """
    chip = traced_chip()
    if chip.platform == "tpu":
        return splash_attention(query, key, value, mask, causal=causal, scale=scale, mean_of_unseen=mean_of_unseen)
    # With a mask cuDNN reads it whole, as 16-bit numbers of size rows x columns a head.
    if mask is not None or chip.platform != "gpu" or query.dtype not in (jnp.float16, jnp.bfloat16):
        return None
    # cuDNN's own limits: features up to 128, in steps of 8 (JAX's documentation of dot_product_attention).
    if query.shape[3] > 128 or query.shape[3] % 8 or (causal and query.shape[1] != key.shape[1]):
        return None
    if not _can_train(query, key):
        return None
    if "NVIDIA" not in chip.kind or (chip.capability or 0) < 8:
        return None
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, scale=scale, implementation="cudnn")


def keras_has_kernel(query: Any, key: Any, value: Any) -> bool:
    """Whether Keras attends by a trusted kernel without scores."""
    # Private, as Keras has no public way to ask.
    from keras.src.backend.jax.nn import _can_use_flash_attention

    low = query.dtype in (jnp.float16, jnp.bfloat16) and _can_train(query, key)
    return traced_chip().platform == "gpu" and low and _can_use_flash_attention(query, key, value, None)


def _can_train(query: Any, key: Any) -> bool:
    """Whether cuDNN has gradients: of odd lengths it has none."""
    return query.shape[1] % 2 == key.shape[1] % 2 == 0


def global_mean(count: Any) -> Any:
    """Divides a device's sum for the global mean."""
    return jax.lax.pmean(count, AXIS) if inside else count


@contextmanager
def steps_compiled_with(options: Mapping[str, Any]) -> Iterator[None]:
    """Compiles with options what Keras makes of steps within."""

    def with_options(jit: Any) -> Any:
        return partial(jit, compiler_options=dict(options)) if jit is jax.jit else jit  # Flax's takes none

    with patched({"keras.src.backend.jax.trainer.jit": with_options} if options else {}):
        yield


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as it is: jit fuses it."""
    return function


def rows_at_once(rows: int, block: int, *, causal: bool) -> int:
    """Counts the rows that attention takes at once: a block's."""
    del rows, causal
    return block


def computed_once(x: Any) -> Any:
    """Returns the same array, not merged with its readers'."""
    return unmerged(x)


def product_over_rows(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a product as it is: the compiler rounds sums."""
    return plain


def step_scopes(gelu: Callable[[Any, bool], Any]) -> Callable[[Any], AbstractContextManager[None]]:
    """Makes scopes that do nothing."""
    del gelu
    return nullcontext
