"""The operation of a traced forward pass that first puts out a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.jax.observe import state_of, traced_here

Tap = Callable[[Any, bool], Any]
Frame = tuple[str, int]


def nonfinite_operation(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], batch: Any, place: int
) -> tuple[str, list[Frame]] | None:
    """Follows a tensor of the forward pass that is not finite back to the operation whose inputs all are.

    Args:
        model: a built Keras model; no variable of it changes.
        forward: `forward(tap, batch) -> (loss, kept)`, as for `observed_step`.
        batch: a structure of arrays.
        place: of the tensor in `kept`.

    Returns:
        JAX's name of the operation, and the lines of Python that led to it, as (file, line number), the innermost
        first; None where the tensor is finite.
    """
    variables = state_of(model)

    def run(values: list[Any], batch: Any) -> Any:
        inside = traced_here()

        def tap(x: Any, watch: bool) -> Any:
            if not inside():
                return None
            return x + jnp.zeros(x.shape, x.dtype) if watch else x

        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)), collect_losses=True):
            return forward(tap, batch)[1][place]

    given = ([variable.value for variable in variables], batch)
    closed = jax.make_jaxpr(run)(*given)
    made = {out: equation for equation in closed.jaxpr.eqns for out in equation.outvars}
    # A float16 that lives between two operations of one loop would otherwise keep float32's range on a CPU.
    finite = jax.jit(_finite(closed), compiler_options={"xla_allow_excess_precision": False})
    flags = [bool(flag) for flag in finite(*jax.tree.leaves(given))]
    bad = {out for out, flag in zip(made, flags, strict=True) if not flag}
    (at,) = closed.jaxpr.outvars
    if at not in bad:
        return None
    while spoiled := [x for x in made[at].invars if not hasattr(x, "val") and x in bad]:
        at = spoiled[0]
    equation = made[at]
    traceback = equation.source_info.traceback
    frames = [(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback is not None else []
    return str(equation.params.get("name", equation.primitive.name)), frames


def _finite(closed: Any) -> Callable[..., list[Any]]:
    """A function that runs a jaxpr, and tells of each output of each equation whether it is finite."""

    def run(*values: Any) -> list[Any]:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, values, strict=True))
        flags = []
        for equation in closed.jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else known[x] for x in equation.invars]
            bound = equation.primitive.get_bind_params(equation.params)
            functions, params = ((), bound) if isinstance(bound, dict) else bound  # jax 0.7: (functions, params)
            outputs = equation.primitive.bind(*functions, *inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            known |= dict(zip(equation.outvars, outputs, strict=True))
            flags += [_all_finite(x) for x in outputs]
        return flags

    return run


def _all_finite(x: Any) -> Any:
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.asarray(True)
