"""Training steps on JAX: as `fit` runs them, to be timed; and without an update, to be looked into."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.common.nonfinite_origin import Tap


def timed_steps(model: keras.Model, batch: tuple) -> Callable[[int], float]:
    """Prepares a compiled model to train on one batch again and again.

    Args:
        model: a compiled model. The state of the training is kept beside it from here on, as `fit` does between
            epochs: the model's own arrays are gone after the first step.
        batch: `(x, y)` or `(x, y, sample_weight)` of numpy arrays.

    Returns:
        A function that makes a number of steps, waits for them, and returns the seconds that they took.
    """
    data = jax.device_put(batch)
    model._symbolic_build(data_batch=data)
    model.make_train_function()
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in variables] for variables in lists)

    def run(steps: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(steps):
            _, state = model.train_function(state, _once(data))
        jax.block_until_ready(state)
        return time.perf_counter() - started

    return run


def _once(batch: Any) -> Iterator[Any]:
    x, y, *weight = batch
    return iter([(x, y, weight[0] if weight else None)])


def observed_step(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], finish: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Compiles a step that computes a loss, its gradients, and those of every tensor on the way that was tapped.

    A tap adds a zero to a tensor; the gradient of that zero is the tensor's.

    Args:
        model: a built Keras model; no variable of it changes.
        forward: `forward(tap, batch) -> (loss, kept)`. `tap(tensor, watch)` returns the tensor to go on with, or
            None where the tensor belongs to the body of a loop or a branch and cannot be seen; with watch=False it only
            tells that. `kept` are tensors of the forward
            pass to look at.
        finish: `finish(loss, kept, gradients, tapped) -> structure of tensors`: the gradients of the trainable
            variables, and of what was tapped, in order; None where the loss does not depend on it.

    Returns:
        `step(batch)`, whose batch is a structure of arrays, and which returns what finish returned.
    """

    def step(trainable: list[Any], others: list[Any], batch: Any) -> Any:
        tapped: list[jax.ShapeDtypeStruct] = []

        def run(trainable: list[Any], zeros: list[Any] | None) -> tuple[Any, list[Any]]:
            tapped.clear()
            inside = traced_here()

            def tap(x: Any, watch: bool) -> Any:
                if not inside():
                    return None
                if not watch:
                    return x
                tapped.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
                # Another tensor in both runs: a layer that returns one tensor twice is then tapped as often in both.
                return x + (jnp.zeros(x.shape, x.dtype) if zeros is None else zeros[len(tapped) - 1])

            mapping = list(zip(state_of(model), [*trainable, *others], strict=True))
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


def state_of(model: keras.Model) -> list[Any]:
    """The variables that a step reads: those that are trained first."""
    return [*model.trainable_variables, *_others(model)]


def traced_here() -> Callable[[], bool]:
    """Returns a function that tells whether it is called in the trace of now, and not in the body of a loop."""
    # Here, because importing Keras does not import it.
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


def step_errors() -> tuple[type[Exception], ...]:
    """The errors of a step whose batch does not fit."""
    return (ValueError, TypeError, IndexError, KeyError)
