"""An optimizer's update as an island: one program on each device, which reads gradients, weights and slots once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

# Private: a graph names its operations, and no public name tells which of them keep a state.
from tensorflow.python.framework import op_def_registry

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.common.keras_private import BaseOptimizer
from keras_mp.backend.tensorflow.islands import has_islands
from keras_mp.backend.tensorflow.tensors import dense, operation_of

# Operations with a state that XLA compiles: those of variables and of branches.
_COMPILED_WITH_STATE = {
    *("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "ReadVariableOp", "ResourceGather"),
    *("If", "StatefulPartitionedCall", "While"),
}

# Each device of these has all variables, and the gradients are summed over the replicas by then.
_WHOLE_ON_EACH_DEVICE = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
_WITHOUT_STRATEGY = {
    f"keras.src.backend.tensorflow.optimizer.TFOptimizer.{method.__name__}": partial(lambda own, _: own, method)
    for method in (BaseOptimizer._backend_update_step, BaseOptimizer._apply_weight_decay)
}


def update_in_one_program(
    update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool, beside: keras.Variable
) -> None:
    """Makes an update as one program a device, where possible.

    It is not where the function has an operation that keeps a state besides variables: one that draws random numbers,
    prints, or calls Python.

    Args:
        update: a function that takes the gradients.
        gradients: gradients, dense or sparse; on replicas summed, so the same on all.
        keeps_rows: whether the update from a sparse gradient changes the rows in it only, and must not see it dense.
        beside: a variable that is on the same devices as those that it assigns to.
    """
    if not has_islands() or (keeps_rows and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)):
        update(gradients)
        return
    gradients = list(map(dense, gradients))
    replica = tf.distribute.get_replica_context()  # None where the strategy is asked, and not a replica
    if not tf.distribute.has_strategy():
        _update(update, gradients)
    elif isinstance(tf.distribute.get_strategy(), _WHOLE_ON_EACH_DEVICE) and replica is not None:

        def on_each_device(strategy: tf.distribute.Strategy, gradients: list[Any]) -> None:
            strategy.extended.update(
                beside.value, lambda _, gradients: _update(update, gradients), args=(gradients,), group=False
            )

        # A Keras optimizer asks the strategy for each variable, which does not answer within a program: there it does
        # as without a strategy, and reads and writes the device's own copies.
        with patched(_WITHOUT_STRATEGY):
            replica.merge_call(on_each_device, args=(gradients,))
    else:
        update(gradients)


def _update(update: Callable[[list[Any]], None], gradients: list[Any]) -> None:
    tensors = list(map(_before_its_cast, gradients))

    def widen_and_update(*tensors: Any) -> None:
        update([tf.cast(tensor, gradient.dtype) for tensor, gradient in zip(tensors, gradients, strict=True)])

    program = tf.function(widen_and_update, jit_compile=True, autograph=False)
    if _compiles(program.get_concrete_function(*tensors).graph.as_graph_def()):
        program(*tensors)
    else:
        update(gradients)


def _before_its_cast(gradient: tf.Tensor) -> tf.Tensor:
    """Undoes a gradient's cast from 16 bits, which programs do."""
    cast = operation_of(gradient, "Cast")
    return cast.inputs[0] if cast is not None and cast.inputs[0].dtype in (tf.bfloat16, tf.float16) else gradient


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
