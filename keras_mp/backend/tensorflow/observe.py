"""A training step on TensorFlow that shows the gradient of each layer's output, and updates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.gradients import dense

Tap = Callable[[Any, bool], Any]


def observed_step(
    model: Any, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], finish: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Compiles a step that computes a loss, its gradients, and those of every tensor on the way that was tapped.

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

    def step(structure: Any, *flat: Any) -> Any:
        batch = tf.nest.pack_sequence_as(structure, flat)
        graph = tf.compat.v1.get_default_graph()
        taps: list[tf.Tensor] = []
        with tf.GradientTape() as tape:

            def tap(x: Any, watch: bool) -> Any:
                if tf.compat.v1.get_default_graph() is not graph:
                    return None
                if not watch:
                    return x
                taps.append(tf.identity(x))
                tape.watch(taps[-1])
                return taps[-1]

            loss, kept = forward(tap, batch)
        weights = [variable.value for variable in model.trainable_variables]
        gradients = [None if g is None else dense(g) for g in tape.gradient(loss, weights + taps)]
        return finish(loss, kept, gradients[: len(weights)], gradients[len(weights) :])

    functions: dict[Any, Any] = {}

    def run(batch: Any) -> Any:
        flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch)]
        specs = tuple(tf.TensorSpec(each.shape, each.dtype) for each in flat)
        if specs not in functions:
            # Concrete functions, because many models in turn have TensorFlow warn of retracing. Without XLA, as Keras
            # trains on a CPU, and because some layers of a model may not compile for it.
            function = tf.function(partial(step, batch), autograph=False)
            functions[specs] = function.get_concrete_function(*specs)
        with _unchanged(model):
            return functions[specs](*flat)

    return run


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Puts back what the forward pass changes: moving statistics, seeds, metrics."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [tf.identity(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def step_errors() -> tuple[type[Exception], ...]:
    """The errors of a step whose batch does not fit."""
    return (ValueError, TypeError, IndexError, KeyError, tf.errors.OpError)
