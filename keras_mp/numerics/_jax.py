"""JAX: the functions of `keras_mp.numerics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from keras_mp.numerics.nonfinite_origin import Edge, Frame, Tap, Values, makes_nonfinite, origin


def observed_step(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], finish: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Compiles a step that computes gradients, also of tapped tensors.

    A tap adds a zero to a tensor; the gradient of that zero is the tensor's.

    Args:
        model: a built Keras model; no variable of it changes.
        forward: `forward(tap, batch) -> (loss, kept)`. `tap(tensor, watch)` returns the tensor to go on with, or
            None where the tensor belongs to the body of a loop or a branch and cannot be seen; with watch=False it only
            tells that. `kept` are tensors of the forward pass to look at.
        finish: `finish(loss, kept, gradients, tapped) -> structure of tensors`: the gradients of the trainable
            variables, and of what was tapped, in order; None where the loss does not depend on it.

    Returns:
        `step(batch)`, whose batch is a structure of arrays, and which returns what finish returned.
    """

    def step(trainable: list[Any], others: list[Any], batch: Any) -> Any:
        tapped: list[jax.ShapeDtypeStruct] = []

        def run(trainable: list[Any], zeros: list[Any] | None) -> tuple[Any, list[Any]]:
            tapped.clear()
            inside = _traced_here()

            def tap(x: Any, watch: bool) -> Any:
                if not inside():
                    return None
                if not watch:
                    return x
                tapped.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
                # Another tensor in both runs: a layer that returns one tensor twice is then tapped as often in both.
                return x + (jnp.zeros(x.shape, x.dtype) if zeros is None else zeros[len(tapped) - 1])

            mapping = list(zip([*model.trainable_variables, *_others(model)], [*trainable, *others], strict=True))
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
                return forward(tap, batch)

        jax.eval_shape(lambda values: run(values, None), trainable)
        zeros = [jnp.zeros(tap.shape, tap.dtype) for tap in tapped]
        (loss, kept), gradients = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(trainable, zeros)
        return finish(loss, kept, *gradients)

    # A float16 that lives between two operations of one loop would otherwise keep float32's range on a CPU.
    compiled = jax.jit(step, compiler_options={"xla_allow_excess_precision": False})

    def with_state(batch: Any) -> Any:
        return compiled([v.value for v in model.trainable_variables], [v.value for v in _others(model)], batch)

    return with_state


def _traced_here() -> Callable[[], bool]:
    """A function that tells whether the trace is still this."""
    try:
        from jax.extend.core import get_opaque_trace_state
    except ImportError:  # jax 0.7
        from jax.core import get_opaque_trace_state
    here = get_opaque_trace_state(convention="nnx")
    return lambda: get_opaque_trace_state(convention="nnx") == here


def _others(model: keras.Model) -> list[Any]:
    trainable = {id(variable) for variable in model.trainable_variables}
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    return list({id(variable): variable for variable in variables if id(variable) not in trainable}.values())


# The errors of a step whose batch does not fit.
STEP_ERRORS = (ValueError, TypeError, IndexError, KeyError)

_TAP = "keras_mp_tap"

# Primitives that move values, and compute none.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather"),
    *("pad", "reshape", "rev", "slice", "sort", "split", "squeeze", "transpose"),
}


def nonfinite_operation(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], batch: Any, place: int
) -> tuple[str, list[Frame]] | None:
    """Finds the operation that made a nonfinite tensor.

    Constant infinities are followed where nothing else is to blame: see `keras_mp.numerics.nonfinite_origin`.

    Args:
        forward: `forward(tap, batch) -> (loss, kept)`, as for `observed_step`.
        place: the place of the tensor in what forward keeps.

    Returns:
        JAX's name of the operation, and the lines of Python that led to it, as (file, line number), the innermost
        first; None where the tensor is finite or a constant.
    """
    variables = [*model.trainable_variables, *_others(model)]

    def run(values: list[Any], batch: Any) -> Any:
        inside = _traced_here()

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
        [
            Edge([same.get(id(x), id(x)) for x in equation.invars], list(map(id, equation.outvars)))
            for equation in equations
        ],
        map(id, closed.jaxpr.invars),
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


def _tapped(jaxpr: Any) -> dict[int, int]:
    """What was tapped, by the output of the tap."""
    same: dict[int, int] = {}
    for equation in filter(_is_tap, jaxpr.eqns):
        (given,), (output,) = equation.invars, equation.outvars
        same[id(output)] = same.get(id(given), id(given))
    return same


def _look(closed: Any) -> Callable[..., Any]:
    """Runs a jaxpr and looks at each equation's outputs."""
    # Two rows of booleans: whether an output is not finite, and whether the equation itself makes it so.

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
