"""What loss scaling needs of TensorFlow: a step undone, sparse gradients, replicas that count by their rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_mp.backend.common.keras_patches import patched
from keras_mp.optimizer._tensorflow import overwrite, update_if


def atomic_step(
    model: keras.Model,
    train_step: Callable[..., Any],
    skips: list[keras.Variable],
    variables: list[keras.Variable],
    results: Callable[[dict, Any], dict],
    state: tuple,
) -> Any:
    """Makes a step; if skipped, undoes what else it changed.

    Args:
        skips: the number of skipped steps in all of each optimizer.
        variables: the variables to put back.
        results: a function that makes the logs of the step's own and of whether it was skipped, after the metrics were
            put back.
        state: the arguments of the step: (batch,).
    """
    del model
    before = [tf.identity(variable.value) for variable in variables]
    skipped_before = [tf.identity(count.value) for count in skips]
    logs = train_step(*state)
    skipped = tf.reduce_any([count.value > old for count, old in zip(skips, skipped_before, strict=True)])
    update_if(skipped, lambda before: overwrite(variables, before), before, variables)
    return results(logs, skipped)


_step = threading.local()


class OnReplicas:
    """Strategy whose replicas draw their own numbers and count rows."""

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        def on_replica(*args: Any, **kwargs: Any) -> Any:
            leaves = [leaf for leaf in keras.tree.flatten(args) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
            _step.rows = tf.shape(leaves[0])[0] if leaves else None
            try:
                return fn(*args, **kwargs)
            finally:
                _step.rows = None

        with patched({"keras.random.SeedGenerator.next": _own_draw}):
            return super().run(on_replica, args, kwargs, options)  # type: ignore[misc]


def share_of_batch() -> Any:
    """Weighs this replica's mean loss by its share of rows.

    A last batch may leave fewer rows to some: a replica with `n` of `N` rows on `R` replicas counts `n R / N`.

    Returns:
        A float32 tensor of shape (), exactly 1 where all have as many rows; None outside a step of several replicas.
    """
    rows, strategy = getattr(_step, "rows", None), tf.distribute.get_strategy()
    if rows is None or strategy.num_replicas_in_sync == 1:
        return None
    own = tf.cast(rows, tf.float32)
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
    return own * strategy.num_replicas_in_sync / total


def _own_draw(draw: Callable[..., Any]) -> Callable[..., Any]:
    def following(generator: Any, ordered: bool = True) -> Any:
        seed = draw(generator, ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return tf.random.experimental.stateless_fold_in(seed, replica)

    return following


def is_variable(thing: Any) -> bool:
    """Tells whether something is a variable of Keras or TensorFlow."""
    return isinstance(thing, (keras.Variable, tf.Variable))


class _NativeVariable(NamedTuple):
    """A variable of TensorFlow's own, read and assigned as Keras's."""

    value: tf.Variable

    def assign(self, value: Any) -> None:
        self.value.assign(value)


def as_keras_variable(variable: Any) -> Any:
    """Gives a variable `value` and `assign`; None outside the strategy."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if not isinstance(native, tf.Variable) or not tf.distribute.get_strategy().extended.variable_created_in_scope(
        native
    ):
        return None
    return variable if isinstance(variable, keras.Variable) else _NativeVariable(native)
