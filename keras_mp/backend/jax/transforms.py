"""Functions that change how others are computed: in one kernel, again, in a loop, without memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.gradients import custom_gradient, jvp_where_moving, with_constants


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the same tensors, with which the compiler may begin nothing before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    return list(jax.lax.optimization_barrier((*tensors, *others))[: len(tensors)])


def unmerged(x: Any) -> Any:
    """Returns the same array, whose computation the compiler does not merge with the same one elsewhere."""
    return barrier([x], [])[0]


def row_major(x: Any, platforms: Sequence[str] = ("tpu",)) -> Any:
    """Returns the same array, which on some platforms lies in memory row by row; a compiler may choose otherwise.

    A transposed array is then really moved, and a product of it takes the path of one that was not transposed.

    Args:
        x: an array.
        platforms: names of "tpu" and "cuda".
    """
    from jax.experimental.layout import Layout, with_layout_constraint  # `import jax` does not import it

    rows = Layout(major_to_minor=tuple(range(len(x.shape))))
    constrained = dict.fromkeys(platforms, lambda x: with_layout_constraint(x, rows))
    return jax.lax.platform_dependent(x, **constrained, default=lambda x: x)


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> None:
    """Returns None: whatever is jitted around it fuses what Keras's layer does."""
    del x, gamma, beta, epsilon


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that keeps its arguments for the backward pass, and there computes what else is needed.

    Args:
        function: a function from arrays to a tuple of arrays; it reads no variable and assigns to none.

    Returns:
        A function with the same results and gradients.
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
    """Calls `step(carry, slices at i) -> (carry, results)` for each i of the slices' first axis, in one loop.

    Args:
        step: a function that keeps the shapes and dtypes of the carry.
        carry: the values that the first step begins with.
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


def gradient_scope() -> Callable[[], Any]:
    """Makes a scope that does nothing: JAX names a backward pass after its forward pass."""
    return nullcontext


def no_allocation() -> AbstractContextManager[None]:
    """A scope in which variables that have an initializer get a shape and a dtype, and no value."""

    def without_value(variable: keras.Variable, initializer: Any) -> None:
        variable._value, variable._initializer = None, initializer

    def keep_initializer(variable: keras.Variable) -> None:
        without_value(variable, variable._initializer)

    return patched(
        {
            "keras.Variable._initialize_with_initializer": lambda initialize: without_value,
            "keras.Variable._deferred_initialize": lambda initialize: keep_initializer,
        }
    )


# Rows that are looked up in a table, whose gradient takes no memory before it is there.


def lookups_wait() -> AbstractContextManager[None]:
    """A scope in which the gradient of a table begins, with zeros, when that of its rows is there.

    XLA for GPUs makes JAX's zeros before the backward pass: an array of the size of an embedding that waits for it.
    """
    return patched({"keras.src.backend.numpy.take": _waiting})


def _waiting(take: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_take, take)


def _take(take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
    x, indices = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(indices, sparse=False)
    is_table = axis == 0 and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    return _rows(take)(x, indices) if is_table else take(x, indices, axis)


def _rows(take: Callable[..., Any]) -> Callable[..., Any]:
    @custom_gradient
    def rows(table: Any, indices: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            (zero,) = barrier([jnp.zeros((), table.dtype)], [upstream])
            return jnp.broadcast_to(zero, table.shape).at[indices].add(upstream, mode="drop"), None

        return take(table, indices, axis=0), gradient

    return rows
