"""TensorFlow: the functions of `keras_mp.numerics`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_mp.backend.tensorflow.tensors import dense, without_islands
from keras_mp.numerics.nonfinite_origin import Edge, Frame, Tap, Values, makes_nonfinite, origin


def observed_step(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], finish: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Compiles an observed step, as `keras_mp.numerics._jax` describes it."""

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
    # What looks at a tensor needs its size. Where batches do not tell it, a run before the step does.
    probes: dict[Any, Any] = {}

    def run(batch: Any) -> Any:
        flat = _flat(batch)
        specs = tuple(map(tf.type_spec_from_value, flat))
        if specs not in probes:
            open_shapes: list[int] = []
            try:
                functions[specs, ()] = compiled_step(batch, (), open_shapes, specs)
            except Exception:
                if not open_shapes:
                    raise
            probes[specs] = _compiled(partial(shapes_of, batch), specs) if open_shapes else lambda *flat: ()
        with _unchanged(model):
            shapes = tuple(tuple(shape.numpy().tolist()) for shape in probes[specs](*flat))
        if (specs, shapes) not in functions:
            functions[specs, shapes] = compiled_step(batch, shapes, [], specs)
        with _unchanged(model):
            return functions[specs, shapes](*flat)

    return run


def _flat(batch: Any) -> list[Any]:
    leaves = tf.nest.flatten(batch)
    return [tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf for leaf in leaves]


def _compiled(function: Callable[..., Any], specs: tuple) -> Any:
    # Concrete functions, because many models in turn have TensorFlow warn of retracing. Without XLA, as Keras
    # trains on a CPU, and because some layers of a model may not compile for it.
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _behind(weights: list[tf.Variable]) -> Callable[[tf.Operation], bool]:
    """Tells of an operation whether a weight comes before it."""
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
    """A tap that notes in `taps` what is watched.

    It gives tensors their `shapes`, where they are known, and notes in `open_shapes` the places of those that are open:
    an operation makes them from values, as TextVectorization does of any batch. Of `weights`, where they are given,
    only what one of them comes before is watched.
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
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Puts back moving statistics, seeds and metrics."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [tf.identity(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


# The errors of a step whose batch does not fit.
STEP_ERRORS = (ValueError, TypeError, IndexError, KeyError, tf.errors.OpError)

# Operations that move values, and compute none.
_MOVES = {
    *("BroadcastTo", "ConcatV2", "ExpandDims", "GatherNd", "GatherV2", "Identity", "IdentityN", "MirrorPad", "Pack"),
    *("Pad", "PadV2", "Reshape", "ReverseV2", "Slice", "Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice"),
    *("Tile", "TopKV2", "Transpose", "Unpack"),
}


def nonfinite_operation(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], batch: Any, place: int
) -> tuple[str, list[Frame]] | None:
    """Finds the operation that made a nonfinite tensor, as `_jax`."""
    flat = _flat(batch)
    program: list[_Program] = []

    @tf.function(autograph=False)
    def look(*leaves: tf.Tensor) -> tf.Tensor:
        _, kept = forward(_shapes_tap([]), tf.nest.pack_sequence_as(batch, leaves))
        program[:] = [_Program(tf.compat.v1.get_default_graph(), kept[place], leaves)]
        return program[0].flags()

    with _unchanged(model), without_islands():  # whose operations are those of another graph
        flags = look.get_concrete_function(*flat)(*flat).numpy()  # called itself, many in turn are warned of
    return program[0].origin(*flags)


class _Program:
    """The operations from a function's arguments to a tensor."""

    def __init__(self, graph: Any, last: tf.Tensor, leaves: Sequence[tf.Tensor]) -> None:
        self._last = last.name
        needed, reached = {last.op.name}, [last.op]
        for operation in reached:  # which grows
            fresh = {x.op.name: x.op for x in operation.inputs if x.op.name not in needed}
            needed |= set(fresh)
            reached += fresh.values()
        operations = [operation for operation in graph.get_operations() if operation.name in needed]
        self._operations = [operation for operation in operations if operation.type != "Placeholder"]
        # A constant that was made outside the graph is a placeholder too.
        given = [x for operation in operations if operation.type == "Placeholder" for x in operation.outputs]
        names = {leaf.name for leaf in leaves}
        self._given = [x.name for x in given if x.name in names or x.dtype in (tf.resource, tf.variant)]
        self._outputs = [x for operation in self._operations for x in operation.outputs if x.dtype.is_floating]

    def flags(self) -> tf.Tensor:
        """Two rows of booleans, as `_jax._look` has them."""
        known: dict[str, Values] = {}

        def values(x: tf.Tensor) -> Values:
            if x.name not in known:
                known[x.name] = _values(x)
            return known[x.name]

        bad, made = [], []
        for output in self._outputs:
            read = [values(x) for x in output.op.inputs if x.dtype.is_floating]
            bad.append(tf.reduce_any(values(output).bad))
            made.append(makes_nonfinite(read, values(output), output.op.type in _MOVES))
        return tf.stack([tf.stack(bad), tf.stack(made)]) if bad else tf.zeros((2, 0), tf.bool)

    def origin(self, bad: Sequence[bool], made: Sequence[bool]) -> tuple[str, list[Frame]] | None:
        """Operation that the tensor comes from, and its lines."""
        edges = [
            Edge([x.name for x in operation.inputs], [x.name for x in operation.outputs])
            for operation in self._operations
        ]
        names = [x.name for x in self._outputs]
        place = origin(edges, self._given, set(compress(names, bad)), set(compress(names, made)), self._last)
        if place is None:
            return None
        operation = self._operations[place]
        return operation.type, [(frame.filename, frame.lineno) for frame in reversed(operation.traceback)]


def _values(x: tf.Tensor) -> Values:
    x = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    infinite = tf.math.is_inf(x)
    return Values(tf.math.is_nan(x), infinite & (x > 0), infinite & (x < 0))
