"""A step's update, or none, on TensorFlow: gradients that may be sparse, replicas, and whose variables it changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

# Private: a graph names its operations, and no public name tells which of them keep a state.
from tensorflow.python.framework import op_def_registry

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.common.keras_private import BaseOptimizer
from keras_mp.backend.tensorflow.devices import traced_chip
from keras_mp.backend.tensorflow.tensors import dense, has_islands, operation_of


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether all values are finite, in one boolean tensor."""

    def one_by_one() -> Any:
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]))

    if _is_jitted_for_an_accelerator():
        return one_by_one()  # one pass, too, and no condition: see update_if
    # One pass each: a value that is not finite makes the sum so. Finite ones can too, if they are huge, and only then
    # are they looked at one by one, which takes two passes.
    wide = [tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor for tensor in tensors]
    sums = [tf.cast(tf.reduce_sum(tensor), tf.float32) for tensor in wide]
    return tf.cond(tf.math.is_finite(tf.add_n(sums)), lambda: tf.constant(True), one_by_one)


def _is_jitted_for_an_accelerator() -> bool:
    return tf.__internal__.get_enclosing_xla_context() is not None and traced_chip().platform != "cpu"


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None] | None,
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which may ask other replicas.

    Args:
        condition: a boolean tensor of shape (), the same on every replica.
        then: a function that is called with the argument, in a replica context, where the condition is true.
        otherwise: the function that is called so where it is false, or None.
        argument: a structure of tensors, of this replica.
        variables: the variables that either may change; JAX needs to know them.
        prepare: a function of the argument before `then` takes it. It is applied before the branch: within, XLA would
            make it part of a clipping norm, whose sum would then be rounded otherwise than without it.
    """
    del variables
    if prepare is not None:
        argument = prepare(argument)
    instead = otherwise or (lambda argument: None)
    # Private: no public name tells whether replicas talk by leaving their context, which a branch does not allow.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(condition, lambda: then(argument), lambda: instead(argument))
        return

    def outside(strategy: tf.distribute.Strategy, condition: Any, argument: Any) -> None:
        def on_each_replica(function: Callable[[Any], None]) -> None:
            strategy.extended.call_for_each_replica(function, args=(argument,))

        same = strategy.experimental_local_results(condition)[0]
        tf.cond(same, lambda: on_each_replica(then), lambda: on_each_replica(instead))

    tf.distribute.get_replica_context().merge_call(outside, args=(condition, argument))


def update_if(
    condition: Any,
    update: Callable[[Any], None],
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Makes an update, or leaves the variables as they were.

    In a step jitted for an accelerator the update is made in any case, and a variable takes its new value or its old
    one within the same kernel. Behind a condition all gradients would wait in memory in float32, and a GPU would stop
    to ask its host which branch to run. A clipping norm may then be rounded otherwise than without the condition, so a
    CPU, which gains nothing, has the condition. The arguments are those of `conditional`.
    """
    if not _is_jitted_for_an_accelerator():
        conditional(condition, update, None, argument, variables, prepare)
        return
    before = [tf.convert_to_tensor(variable.value) for variable in variables]
    update(argument if prepare is None else prepare(argument))
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(condition, variable.value, old))


def overwrite(variables: list[keras.Variable], values: list[Any]) -> None:
    """Assigns each replica its own tensor, or another variable's value."""
    values = [value.value if isinstance(value, keras.Variable) else value for value in values]

    # Not variable.assign, which takes the mean over the replicas, and three times a third is not always the whole.
    def outside(strategy: tf.distribute.Strategy, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda to, new: to.assign(new), args=(value,), group=False)

    # Private: the public merge_call does not run in the branch of a conditional where there is one replica.
    tf.__internal__.distribute.interim.maybe_merge_call(outside, tf.distribute.get_strategy(), values)


def sum_repeated_rows(gradient: Any) -> Any:
    """Sums the rows that a sparse gradient holds several times."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)


def replica_count() -> int:
    """Counts the replicas of the current distribution strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def any_replica(flag: Any) -> Any:
    """Tells each replica whether a flag is true on any."""
    if replica_count() == 1:
        return flag
    # tf.distribute reduces by sum and mean only.
    votes = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flag, tf.float32))
    return votes > 0


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Sums tensors, sparse ones too, over replicas, in their context."""
    if replica_count() == 1 or not tensors:
        return tensors
    context = tf.distribute.get_replica_context()
    return [sum_repeated_rows(tensor) for tensor in context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)]


def max_over_replicas(tensor: Any) -> Any:
    """Takes the maximum over the replicas, in their context."""
    if replica_count() == 1:
        return tensor
    return tf.reduce_max(tf.distribute.get_replica_context().all_gather(tensor[tf.newaxis], axis=0), axis=0)


def reduce_dtype() -> str:
    """What the current strategy sums gradients in."""
    plan = getattr(tf.distribute.get_strategy(), "plan", None)
    return "float32" if plan is None else plan.reduce_dtype


def check_host_memory() -> None:
    """Refuses: XLA on TensorFlow cannot name the host's memory."""
    raise ValueError("state_memory='host' needs JAX: set the environment variable KERAS_BACKEND to 'jax'")


def fetches_early() -> bool:
    """Never: nothing lies in memory of the host."""
    return False


def keep_on_host(variable: keras.Variable) -> None:
    """Leaves a variable where it is."""


def fetched(array: Any, after: list[Any]) -> Any:
    """Returns the tensor: it is where it is used."""
    return array


def stored(array: Any) -> Any:
    """Returns the tensor: it stays where it is."""
    return array


# An optimizer's update as an island: one program on each device, which reads gradients, weights and slots once.

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
    def has_state(operation: str) -> bool:
        definition = op_def_registry.get(operation)
        return definition is None or definition.is_stateful

    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return all(
        (node.op in _COMPILED_WITH_STATE or not has_state(node.op))
        and all(attribute.type != tf.string.as_datatype_enum for attribute in node.attr.values())
        for node in nodes
    )


HAS_SPARSE_GRADIENTS = True


ACCUMULATING_COPIES = False
