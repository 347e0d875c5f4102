"""The operation of a traced forward pass that first puts out a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_mp.backend.common.nonfinite_origin import Edge, Frame, Tap, Values, makes_nonfinite, origin
from keras_mp.backend.tensorflow.islands import without_islands
from keras_mp.backend.tensorflow.steps import unchanged

# Operations that move values, and compute none.
_MOVES = {
    *("BroadcastTo", "ConcatV2", "ExpandDims", "GatherNd", "GatherV2", "Identity", "IdentityN", "MirrorPad", "Pack"),
    *("Pad", "PadV2", "Reshape", "ReverseV2", "Slice", "Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice"),
    *("Tile", "TopKV2", "Transpose", "Unpack"),
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
        TensorFlow's name of the operation, and the lines of Python that led to it, as (file, line number), the
        innermost first; None where the tensor is finite, or no operation puts it out.
    """
    flat = [
        tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
        for leaf in tf.nest.flatten(batch)
    ]
    program: list[_Program] = []

    @tf.function(autograph=False)
    def look(*leaves: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()

        def tap(x: Any, watch: bool) -> Any:
            if tf.compat.v1.get_default_graph() is not graph:
                return None
            return tf.identity(x) if watch else x

        _, kept = forward(tap, tf.nest.pack_sequence_as(batch, leaves))
        program[:] = [_Program(graph, kept[place], leaves)]
        return program[0].flags()

    with unchanged(model), without_islands():  # whose operations are those of another graph
        flags = look.get_concrete_function(*flat)(*flat).numpy()  # called itself, many in turn are warned of
    return program[0].origin(*flags)


class _Program:
    """The operations of a graph that lead to a tensor.

    Args:
        graph: the graph of a function.
        last: the tensor.
        leaves: the function's arguments.
    """

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
        """Two rows of booleans, a column a float output.

        They tell whether it is not finite, and whether its operation itself makes it so.
        """
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
        """The operation from which the tensor comes, and its lines of Python."""
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
