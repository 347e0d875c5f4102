"""A step's update, or none."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backend.tensorflow.devices import traced_chip


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether every value of some tensors is finite: a boolean tensor of shape ()."""

    def one_by_one() -> Any:
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]))

    if _is_jitted_for_an_accelerator():
        return one_by_one()  # one pass, too, and no condition: see update_if
    # One pass each: a value that is not finite makes the sum so. Finite ones can too, if they are huge, and only then
    # are they looked at one by one, which takes two passes.
    sums = [tf.cast(tf.reduce_sum(_at_least_float32(tensor)), tf.float32) for tensor in tensors]
    return tf.cond(tf.math.is_finite(tf.add_n(sums)), lambda: tf.constant(True), one_by_one)


def _is_jitted_for_an_accelerator() -> bool:
    return tf.__internal__.get_enclosing_xla_context() is not None and traced_chip().platform != "cpu"


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None] | None,
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which may assign to variables and talk to the other replicas.

    Args:
        condition: a boolean tensor of shape (), the same on every replica.
        then: a function that is called with the argument, in a replica context, where the condition is true.
        otherwise: a function that is called with the argument, in a replica context, where the condition is false;
            None for none.
        argument: a structure of tensors, of this replica.
        variables: the variables that either may change; JAX needs to know them.
        prepare: a function that is applied to the argument before `then` takes it. It is applied before the branch:
            within, XLA would make it part of a clipping norm, whose sum would then be rounded otherwise than without
            it.
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
    """Calls a function that assigns to variables, and where the condition is false leaves them as they were.

    In a step jitted for an accelerator the update is made in any case, and a variable takes its new value or its old
    one within the same kernel. Behind a condition all gradients would wait in memory in float32, and a GPU would stop
    to ask its host which branch to run. A clipping norm may then be rounded otherwise than without the condition, so a
    CPU, which gains nothing, has the condition.

    Args:
        condition: a boolean tensor of shape (), the same on every replica.
        update: a function that is called with the argument, in a replica context.
        argument: a structure of tensors, of this replica.
        variables: the variables that it may change.
        prepare: a function that is applied to the argument before.
    """
    if not _is_jitted_for_an_accelerator():
        conditional(condition, update, None, argument, variables, prepare)
        return
    before = [tf.convert_to_tensor(variable.value) for variable in variables]
    update(argument if prepare is None else prepare(argument))
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(condition, variable.value, old))


def overwrite(variables: list[keras.Variable], values: list[Any]) -> None:
    """Assigns to each variable, on each replica, that replica's value; call it in a replica context.

    Args:
        variables: Keras variables.
        values: a tensor, or another Keras variable, for each.
    """
    values = [value.value if isinstance(value, keras.Variable) else value for value in values]

    # Not variable.assign, which takes the mean over the replicas, and three times a third is not always the whole.
    def outside(strategy: tf.distribute.Strategy, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda to, new: to.assign(new), args=(value,), group=False)

    # Private: the public merge_call does not run in the branch of a conditional where there is one replica.
    tf.__internal__.distribute.interim.maybe_merge_call(outside, tf.distribute.get_strategy(), values)


def atomic_step(
    model: keras.Model,
    train_step: Callable[..., Any],
    skips: list[keras.Variable],
    variables: list[keras.Variable],
    results: Callable[[dict, Any], dict],
    state: tuple,
) -> Any:
    """Makes a training step, and if an optimizer skipped it, puts back what else it had changed.

    Args:
        model: a compiled Keras model.
        train_step: the step, from a batch to the logs.
        skips: the number of skipped steps in all of each optimizer.
        variables: the variables to put back.
        results: a function that makes the logs of the step's own and of whether it was skipped, after the metrics were
            put back.
        state: the arguments of the step: (batch,).

    Returns:
        The logs, metrics in them as they are after the step.
    """
    del model
    before = [tf.identity(variable.value) for variable in variables]
    skipped_before = [tf.identity(count.value) for count in skips]
    logs = train_step(*state)
    skipped = tf.reduce_any([count.value > old for count, old in zip(skips, skipped_before, strict=True)])
    update_if(skipped, lambda before: overwrite(variables, before), before, variables)
    return results(logs, skipped)


def is_concrete(tensor: Any) -> bool:
    """Tells whether a tensor has a value now, and is no part of a program that is being traced."""
    return hasattr(tensor, "numpy")
