"""Islands: jitted programs inside a step that is not jitted as a whole.

On a CPU TensorFlow's kernels multiply 16-bit matrices faster than XLA's code does, so that the step is not jitted. What
lies between the products reads and writes memory once a kernel there, and once in all where XLA compiles it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import tensorflow as tf

# Private: no public name tells whether a tape records.
from tensorflow.python.eager.record import could_possibly_record

# Private: a graph names its operations, and no public name tells which of them keep a state.
from tensorflow.python.framework import op_def_registry

from keras_mp.backend.tensorflow.devices import is_for_cpu
from keras_mp.backend.tensorflow.gradients import dense

_ALLOWED: ContextVar[bool] = ContextVar("islands_allowed", default=True)
# Operations with a state that XLA compiles: those of variables and of branches.
_COMPILED_WITH_STATE = {
    *("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "ReadVariableOp", "ResourceGather"),
    *("If", "StatefulPartitionedCall", "While"),
}


@contextmanager
def without_islands() -> Iterator[None]:
    """Within it, what is traced has no islands."""
    before = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def has_islands() -> bool:
    """Tells whether what is traced now may have islands: a graph for one CPU that is not jitted as a whole."""
    return (
        _ALLOWED.get()
        and tf.inside_function()
        # A strategy, of one device too, refuses to sum over its replicas within another program.
        and not tf.distribute.has_strategy()
        and _runs_kernels_of_cpus()
    )


def is_differentiated_island() -> bool:
    """Tells whether what is traced now may have islands, and a tape records: in inference there are none."""
    return could_possibly_record() and has_islands()


def is_differentiated_by_kernels_of_cpus() -> bool:
    """Tells whether a tape records what is traced or run now, by kernels of a CPU, islands or not."""
    return could_possibly_record() and _runs_kernels_of_cpus()


def _runs_kernels_of_cpus() -> bool:
    return tf.__internal__.get_enclosing_xla_context() is None and is_for_cpu()


def in_differentiated_island(
    forward: Callable[..., Any], backward: Callable[..., list[Any]], tensors: list[Any], how: Hashable
) -> Any | None:
    """Calls a function as an island: one program forward, and one backward, which gets the tensors and nothing else.

    All calls with the same functions, shapes and settings share the two programs, so a new batch size compiles two.

    Args:
        forward: `forward(*tensors, how=how)`, a float tensor. It reads no variable.
        backward: `backward(upstream, *tensors, how=how)`, the gradient of each tensor.
        tensors: floats.
        how: settings.

    Returns:
        The result; None where there is no island. That is also in inference, which an export keeps as plain operations,
        and where a size but for the first is unknown: each length would compile anew.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not (is_differentiated_island() and all(map(_has_known_sizes, tensors))):
        return None

    @tf.custom_gradient
    def apply(*tensors: Any) -> Any:
        return _program(forward)(*tensors, how=how), lambda upstream: _program(backward)(upstream, *tensors, how=how)

    return apply(*tensors)


@cache
def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False)


def _has_known_sizes(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is not None and None not in tensor.shape[1:]


def update_in_one_program(update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool) -> None:
    """Calls a function that assigns to variables, as an island where that is possible.

    It is not where the function has an operation that keeps a state besides variables: one that draws random numbers,
    prints, or calls Python.

    Args:
        update: takes the gradients.
        gradients: dense or sparse.
        keeps_rows: whether the update from a sparse gradient changes the rows in it only, and must not see it dense.
    """
    if not has_islands() or (keeps_rows and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)):
        update(gradients)
        return
    gradients = list(map(dense, gradients))
    tensors = list(map(_before_its_cast, gradients))

    def widen_and_update(*tensors: Any) -> None:
        update([tf.cast(tensor, gradient.dtype) for tensor, gradient in zip(tensors, gradients, strict=True)])

    program = tf.function(widen_and_update, jit_compile=True, autograph=False)
    if _compiles(program.get_concrete_function(*tensors).graph.as_graph_def()):
        program(*tensors)
    else:
        update(gradients)


def _before_its_cast(gradient: tf.Tensor) -> tf.Tensor:
    """The 16 bits that a gradient was cast from: the program casts them itself, and no copy in float32 is made."""
    if isinstance(gradient, tf.__internal__.EagerTensor) or gradient.op.type != "Cast":
        return gradient
    return gradient.op.inputs[0] if gradient.op.inputs[0].dtype in (tf.bfloat16, tf.float16) else gradient


def _compiles(graph: Any) -> bool:
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return all(
        (node.op in _COMPILED_WITH_STATE or not _has_state(node.op))
        and all(attribute.type != tf.string.as_datatype_enum for attribute in node.attr.values())
        for node in nodes
    )


def _has_state(operation: str) -> bool:
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful
