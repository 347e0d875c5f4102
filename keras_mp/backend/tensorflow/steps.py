"""Training steps on TensorFlow: as `fit` runs them, to be timed; and without an update, to be looked into."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_mp.backend.common.nonfinite_origin import Tap
from keras_mp.backend.tensorflow.gradients import dense


def bfloat16_options() -> Mapping[str, Any]:
    """None: on a CPU TensorFlow's kernels multiply bfloat16 matrices, and no program of XLA does."""
    return {}


def steps_compiled_with(options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A scope that does nothing: `tf.function` takes no options of XLA's compiler."""
    del options
    return nullcontext()


def timed_steps(model: keras.Model, batch: tuple) -> Callable[[int], float]:
    """Prepares a compiled model to train on one batch again and again.

    Args:
        model: a compiled model; its weights will change.
        batch: `(x, y)` or `(x, y, sample_weight)` of numpy arrays.

    Returns:
        A function that makes a number of steps, waits for them, and returns the seconds that they took.
    """
    tensors = keras.tree.map_structure(tf.convert_to_tensor, batch)
    dataset = tf.data.Dataset.from_tensors(tensors).repeat()
    options = tf.data.Options()
    # Its search for the best settings takes the processor from the steps.
    options.autotune.enabled = False
    batches = iter(dataset.with_options(options))
    model._symbolic_build(data_batch=tensors)
    model.make_train_function()

    def run(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            logs = model.train_function(batches)
        # A tensor that is not computed yet is waited for when it is read.
        for value in keras.tree.flatten(logs):
            np.asarray(value)
        return time.perf_counter() - started

    return run


def observed_step(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], finish: Callable[..., Any]
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

    def step(structure: Any, shapes: Sequence[tuple], open_shapes: list[int], behind: bool, *flat: Any) -> Any:
        batch = tf.nest.pack_sequence_as(structure, flat)
        taps: list[tf.Tensor] = []
        weights = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            tap = _tap(taps, tape, shapes, open_shapes, weights if behind else None)
            loss, kept = forward(tap, batch)
        gradients = [None if g is None else dense(g) for g in tape.gradient(loss, weights + taps)]
        return finish(loss, kept, gradients[: len(weights)], gradients[len(weights) :])

    def shapes_of(structure: Any, *flat: Any) -> list[tf.Tensor]:
        shapes: list[tf.Tensor] = []
        forward(_shapes_tap(shapes), tf.nest.pack_sequence_as(structure, flat))
        return shapes

    def compiled_step(batch: Any, shapes: Sequence[tuple], open_shapes: list[int], specs: tuple) -> Any:
        try:
            return _compiled(partial(step, batch, shapes, open_shapes, False), specs)
        except TypeError:
            # An operation has no gradient in this dtype, as that of RandomRotation in bfloat16. Training does not ask
            # for it where no weight comes before.
            return _compiled(partial(step, batch, shapes, open_shapes, True), specs)

    functions: dict[Any, Any] = {}
    probes: dict[Any, Any] = {}

    def run(batch: Any) -> Any:
        flat = [
            tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
            for leaf in tf.nest.flatten(batch)
        ]
        specs = tuple(map(tf.type_spec_from_value, flat))
        if (specs, None) not in functions and specs not in probes:
            open_shapes: list[int] = []
            try:
                functions[specs, None] = compiled_step(batch, [], open_shapes, specs)
            except Exception:
                if not open_shapes:
                    raise
            if open_shapes:  # what looks at a tensor needs its size, which such a batch does not tell
                functions.pop((specs, None), None)
                probes[specs] = _compiled(partial(shapes_of, batch), specs)
        if specs not in probes:
            with unchanged(model):
                return functions[specs, None](*flat)
        with unchanged(model):
            shapes = tuple(tuple(shape.numpy().tolist()) for shape in probes[specs](*flat))
        if (specs, shapes) not in functions:
            functions[specs, shapes] = compiled_step(batch, shapes, [], specs)
        with unchanged(model):
            return functions[specs, shapes](*flat)

    return run


def _compiled(function: Callable[..., Any], specs: tuple) -> Any:
    # Concrete functions, because many models in turn have TensorFlow warn of retracing. Without XLA, as Keras
    # trains on a CPU, and because some layers of a model may not compile for it.
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _behind(weights: list[tf.Variable]) -> Callable[[tf.Operation], bool]:
    """Tells of an operation of the graph that is being traced whether one of some weights comes before it."""
    graph = tf.compat.v1.get_default_graph()
    handles = {id(graph.capture(weight.handle)) for weight in weights}
    known: dict[tf.Operation, bool] = {}

    def is_behind(operation: tf.Operation) -> bool:
        stack = [operation]
        while stack:
            top = stack[-1]
            unknown = [x.op for x in top.inputs if id(x) not in handles and x.op not in known]
            if unknown and top not in known:
                stack += unknown
            else:
                known[stack.pop()] = any(id(x) in handles or known[x.op] for x in top.inputs)
        return known[operation]

    return is_behind


def _tap(
    taps: list[tf.Tensor],
    tape: tf.GradientTape,
    shapes: Sequence[tuple],
    open_shapes: list[int],
    weights: list[tf.Variable] | None,
) -> Tap:
    """A tap that watches; it gives tensors their shapes, or notes which it has none for.

    A tensor's shape is open in the graph where an operation makes it from values: TextVectorization does of any batch.

    Args:
        taps: a list that gets the tensors that are watched.
        tape: the tape that watches them.
        shapes: the shape of every tensor that is tapped, in order; empty where they are not known.
        open_shapes: a list that gets the places of the tensors whose shapes are open.
        weights: weights of which only what one of them comes before is watched; None for all.
    """
    graph = tf.compat.v1.get_default_graph()
    places = itertools.count()
    is_behind = None if weights is None else _behind(weights)

    def tap(x: Any, watch: bool) -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            return None
        place = next(places)
        if not x.shape.is_fully_defined():
            if place < len(shapes):
                x.set_shape(shapes[place])
            else:
                open_shapes.append(place)
        if not watch:
            return x
        taps.append(tf.identity(x))
        if is_behind is None or is_behind(x.op):
            tape.watch(taps[-1])
        return taps[-1]

    return tap


def _shapes_tap(shapes: list[tf.Tensor]) -> Tap:
    graph = tf.compat.v1.get_default_graph()

    def tap(x: Any, watch: bool) -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            return None
        shapes.append(tf.shape(x))
        return tf.identity(x) if watch else x

    return tap


@contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
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
