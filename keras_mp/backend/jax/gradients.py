"""Functions with gradients of their own, of all orders.

JAX's `custom_vjp` knows no forward mode. Here the function's own gradient is the transpose of a linear operation, from
the tangents of the arguments to those of the results: reverse mode transposes that operation, which calls the gradient;
forward mode computes it, as the transpose of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def in_forward_mode(tensors: Sequence[Any]) -> bool:
    """Returns False: JAX has forward mode for what `custom_gradient` makes."""
    return False


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function with a gradient of its own.

    The function is called again for each order of derivatives, so it must be pure.
    """

    @jax.custom_jvp
    def call(*arguments: Any) -> Any:
        return function(*arguments)[0]

    @partial(call.defjvp, symbolic_zeros=True)
    def differentiate(arguments: Any, tangents: Any) -> Any:
        results, gradient = function(*arguments)
        leaves, structure = jax.tree.flatten(results)
        of_leaves = _tangents(
            leaves, gradient, arguments, [not isinstance(x, SymbolicZero) for x in tangents], tangents
        )
        # The derivatives of the next order are again those of the function, and not of the operations in it.
        leaves = as_result.bind(*map(jax.lax.stop_gradient, leaves), *arguments, function=function, count=len(leaves))
        return tuple(jax.tree.unflatten(structure, x) for x in (leaves, of_leaves))

    def on_arrays(*arguments: Any) -> Any:
        return call(*varying_alike([jnp.asarray(argument) for argument in arguments]))

    return on_arrays


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Makes arrays differ along the same axes of a mesh."""
    # Within `jax.shard_map` JAX keeps account of it.
    return [varying_as(x, arrays) for x in arrays]


def varying_as(x: Any, arrays: Sequence[Any]) -> Any:
    """Says that an array differs along the others' axes."""
    return _varying(x, frozenset().union(*(_axes(jax.typeof(other)) for other in arrays)) - _axes(jax.typeof(x)))


def _axes(aval: Any) -> frozenset[str]:
    kind = getattr(aval, "mat", None)  # from jax 0.10 on
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


def _varying(x: Any, axes: frozenset[str]) -> Any:
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return jax.lax.pvary(x, tuple(axes))  # type: ignore[attr-defined]  # before jax 0.9


def _tangents(
    results: Sequence[Any], gradient: Callable[..., Any], arguments: Sequence[Any], moving: list[bool], tangents: Any
) -> list[Any]:
    """Makes the tangents of results from those that move."""
    places = [place for place, moves in enumerate(moving) if moves]

    def transposed(*upstream: Any) -> list[Any]:
        to_arguments = gradient(*upstream)
        to_arguments = to_arguments if isinstance(to_arguments, list | tuple) else [to_arguments]
        pairs = [(to_arguments[place], arguments[place]) for place in places]
        return [jnp.zeros_like(argument) if to_one is None else to_one for to_one, argument in pairs]

    rule = jax.make_jaxpr(transposed)(*results)
    operands = [*rule.consts, *(tangents[place] for place in places)]
    return _linear.bind(*operands, rule=rule.jaxpr, count=len(rule.consts))


# The first `count` operands, which are what the function makes of the others.
as_result = Primitive("keras_mp_result")
as_result.multiple_results = True


def _first(*operands: Any, function: Callable[..., Any], count: int) -> list[Any]:
    return list(operands[:count])


def _result_differentiated(primals: Any, tangents: Any, *, function: Callable[..., Any], count: int) -> Any:
    arguments = primals[count:]
    results, gradient = function(*arguments)
    moving = [not isinstance(tangent, ad.Zero) for tangent in tangents[count:]]
    own = as_result.bind(*primals, function=function, count=count)
    if not any(moving):
        return own, [ad.Zero.from_primal_value(x) for x in own]  # type: ignore[attr-defined]  # it has no types
    return own, _tangents(jax.tree.leaves(results), gradient, arguments, moving, tangents[count:])


def _result_batched(operands: Any, axes: Any, *, function: Callable[..., Any], count: int) -> Any:
    size = _batch_size(operands, axes)
    results = [_in_front(x, axis, size) for x, axis in zip(operands[:count], axes[:count], strict=True)]
    of_all = jax.vmap(custom_gradient(function), in_axes=tuple(axes[count:]))

    def batched(*arguments: Any) -> Any:
        results, pull_back = jax.vjp(of_all, *arguments)
        structure = jax.tree.structure(results)
        return results, lambda *upstream: pull_back(jax.tree.unflatten(structure, upstream))

    return as_result.bind(*results, *operands[count:], function=batched, count=count), [0] * count


def _batch_size(operands: Any, axes: Any) -> int:
    return next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)


def _in_front(x: Any, axis: int | None, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


as_result.def_impl(_first)
as_result.def_abstract_eval(_first)
mlir.register_lowering(as_result, mlir.lower_fun(_first, multiple_results=True))
ad.primitive_jvps[as_result] = _result_differentiated
batching.primitive_batchers[as_result] = _result_batched


# Of `count` constants, which the rule closes over, and tangents; to as many as the rule has arguments. The rule is the
# transpose.
_linear = Primitive("keras_mp_linear")
_linear.multiple_results = True


def _linear_computed(*operands: Any, rule: Any, count: int) -> list[Any]:
    transposed = with_constants(rule, operands[:count])
    # Linear, so that the place where it is differentiated does not matter.
    _, pull_back = jax.vjp(lambda *upstream: transposed(*upstream), *map(_zeros, rule.invars))
    return list(pull_back(list(operands[count:])))


def jvp_where_moving(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Computes results and their tangents, from those not `Zero`."""
    places = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*moved: Any) -> Any:
        operands = list(primals)
        for place, operand in zip(places, moved, strict=True):
            operands[place] = operand
        return function(*operands)

    moved, directions = ([values[place] for place in places] for values in (primals, tangents))
    return jax.jvp(of_moving, moved, directions)


def with_constants(rule: Any, constants: Sequence[Any]) -> Callable[..., Any]:
    """Makes a traced program a function of its other arguments."""
    return jaxpr_as_fun(ClosedJaxpr(rule, list(constants)))


def _zeros(variable: Any) -> Any:
    zeros = jnp.zeros(variable.aval.shape, variable.aval.dtype)
    return _varying(zeros, _axes(variable.aval))


def _linear_differentiated(primals: Any, tangents: Any, *, rule: Any, count: int) -> Any:
    results = _linear.bind(*primals, rule=rule, count=count)
    summands = []
    if any(not isinstance(tangent, ad.Zero) for tangent in tangents[count:]):
        moved = [*primals[:count], *map(ad.instantiate_zeros, tangents[count:])]
        summands.append(_linear.bind(*moved, rule=rule, count=count))
    if any(not isinstance(tangent, ad.Zero) for tangent in tangents[:count]):
        computed = partial(_linear_computed, rule=rule, count=count)
        summands.append(jvp_where_moving(computed, primals, tangents[:count])[1])
    return results, [sum(parts[1:], parts[0]) for parts in zip(*summands, strict=True)]


def _linear_transposed(upstream: Any, *operands: Any, rule: Any, count: int) -> list[Any]:
    given = [
        _zeros(variable) if isinstance(x, ad.Zero) else x for variable, x in zip(rule.invars, upstream, strict=True)
    ]
    to_tangents = with_constants(rule, operands[:count])(*given)
    pairs = zip(operands[count:], to_tangents, strict=True)
    return [None] * count + [x if ad.is_undefined_primal(tangent) else None for tangent, x in pairs]


def _linear_batched(operands: Any, axes: Any, *, rule: Any, count: int) -> Any:
    size = _batch_size(operands, axes)
    constants = operands[:count]
    tangents = [_in_front(x, axis, size) for x, axis in zip(operands[count:], axes[count:], strict=True)]

    def of_one(constants: Any, *upstream: Any) -> Any:
        return with_constants(rule, constants)(*upstream)

    def of_all(*upstream: Any) -> Any:
        return jax.vmap(of_one, in_axes=(list(axes[:count]), *[0] * len(upstream)))(list(constants), *upstream)

    shapes = [jax.ShapeDtypeStruct((size, *v.aval.shape), v.aval.dtype) for v in rule.invars]
    batched = jax.make_jaxpr(of_all)(*shapes)
    results = _linear.bind(*batched.consts, *tangents, rule=batched.jaxpr, count=len(batched.consts))
    return results, [0] * len(results)


_linear.def_impl(_linear_computed)
_linear.def_abstract_eval(lambda *operands, rule, count: [variable.aval for variable in rule.invars])
mlir.register_lowering(_linear, mlir.lower_fun(_linear_computed, multiple_results=True))
ad.primitive_jvps[_linear] = _linear_differentiated
ad.primitive_transposes[_linear] = _linear_transposed
batching.primitive_batchers[_linear] = _linear_batched


def gradients_of(function: Callable[..., Any], arguments: Sequence[Any], upstream: Any) -> list[Any]:
    """Computes the gradients of `sum(upstream result)`, one an argument."""
    return list(jax.vjp(function, *arguments)[1](upstream))
