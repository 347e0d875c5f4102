"""The operation of a traced forward pass that first puts out a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from keras_mp.backend.common.nonfinite_origin import Edge, Frame, Tap, Values, makes_nonfinite, origin
from keras_mp.backend.jax.steps import state_of, traced_here

_TAP = "keras_mp_tap"
# Primitives that move values, and compute none.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather"),
    *("pad", "reshape", "rev", "slice", "sort", "split", "squeeze", "transpose"),
}


def nonfinite_operation(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], batch: Any, place: int
) -> tuple[str, list[Frame]] | None:
    """Follows a tensor of the forward pass that is not finite back to the operation that first made it so.

    Constant infinities are followed where nothing else is to blame: see `keras_mp.backend.common.nonfinite_origin`.

    Args:
        model: a built Keras model; no variable of it changes.
        forward: `forward(tap, batch) -> (loss, kept)`, as for `observed_step`.
        batch: a structure of arrays.
        place: the place of the tensor in `kept`.

    Returns:
        JAX's name of the operation, and the lines of Python that led to it, as (file, line number), the innermost
        first; None where the tensor is finite or a constant.
    """
    variables = state_of(model)

    def run(values: list[Any], batch: Any) -> Any:
        inside = traced_here()

        def tap(x: Any, watch: bool) -> Any:
            if not inside():
                return None
            return checkpoint_name(jnp.asarray(x, x.dtype), _TAP) if watch else x

        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)), collect_losses=True):
            return forward(tap, batch)[1][place]

    given = ([variable.value for variable in variables], batch)
    closed = jax.make_jaxpr(run)(*given)
    same = _tapped(closed.jaxpr)
    equations = [equation for equation in closed.jaxpr.eqns if not _is_tap(equation)]
    # A float16 that lives between two operations of one loop would otherwise keep float32's range on a CPU.
    look = jax.jit(_look(closed), compiler_options={"xla_allow_excess_precision": False})
    bad, made = np.asarray(look(*jax.tree.leaves(given)))
    outputs = [output for equation in equations for output in equation.outvars]
    first = origin(
        [Edge([same.get(id(x), id(x)) for x in equation.invars], _ids(equation.outvars)) for equation in equations],
        _ids(closed.jaxpr.invars),
        {id(output) for output, flag in zip(outputs, bad, strict=True) if flag},
        {id(output) for output, flag in zip(outputs, made, strict=True) if flag},
        *(same.get(id(x), id(x)) for x in closed.jaxpr.outvars),
    )
    if first is None:
        return None
    equation = equations[first]
    traceback = equation.source_info.traceback
    frames = [(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback is not None else []
    return str(equation.params.get("name", equation.primitive.name)), frames


def _is_tap(equation: Any) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == _TAP


def _ids(variables: Sequence[Any]) -> list[int]:
    return [id(variable) for variable in variables]


def _tapped(jaxpr: Any) -> dict[int, int]:
    """For each variable that a tap puts out, what was tapped."""
    same: dict[int, int] = {}
    for equation in filter(_is_tap, jaxpr.eqns):
        (given,), (output,) = equation.invars, equation.outvars
        same[id(output)] = same.get(id(given), id(given))
    return same


def _look(closed: Any) -> Callable[..., Any]:
    """A function that runs a jaxpr, and looks at each output of each equation but the taps.

    It returns two rows of booleans: whether the output is not finite, and whether the equation itself makes it so.
    """

    def run(*values: Any) -> Any:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, values, strict=True))
        flags: list[tuple[Any, Any]] = []
        for equation in closed.jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else known[x] for x in equation.invars]
            bound = equation.primitive.get_bind_params(equation.params)
            functions, params = ((), bound) if isinstance(bound, dict) else bound  # jax 0.7: (functions, params)
            outputs = equation.primitive.bind(*functions, *inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            known |= dict(zip(equation.outvars, outputs, strict=True))
            if _is_tap(equation):
                continue
            read = [_values(x) for x in inputs if _is_float(x)]
            flags += [_flags(read, output, equation.primitive.name in _MOVES) for output in outputs]
        return jnp.stack([jnp.stack(row) for row in zip(*flags, strict=True)])

    return run


def _flags(inputs: list[Values], output: Any, moves: bool) -> tuple[Any, Any]:
    if not _is_float(output):
        return jnp.asarray(False), jnp.asarray(False)
    values = _values(output)
    return values.bad.any(), makes_nonfinite(inputs, values, moves)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _values(x: Any) -> Values:
    x = jnp.asarray(x)
    infinite = jnp.isinf(x)
    above = x.real > 0
    return Values(jnp.isnan(x), infinite & above, infinite & ~above)
