"""What a step on several replicas of TensorFlow needs: rows that count alike, and random numbers of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.tensorflow.gradients import sum_repeated_rows

_step = threading.local()


class OnReplicas:
    """A strategy each of whose replicas draws random numbers of its own, and counts in a step by the rows it has."""

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
    """By how much to multiply the mean loss of this replica, so that the mean over replicas is that over the rows.

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


def replica_count() -> int:
    """Returns how many replicas of a model the current distribution strategy trains."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def any_replica(flag: Any) -> Any:
    """Tells whether a flag is true on any replica; call it in a replica context.

    Args:
        flag: a boolean tensor of shape (), of this replica.

    Returns:
        A boolean tensor of shape (), the same on every replica.
    """
    if replica_count() == 1:
        return flag
    # tf.distribute reduces by sum and mean only.
    votes = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flag, tf.float32))
    return votes > 0


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Adds up tensors of each replica, sparse ones too; call it in a replica context."""
    if replica_count() == 1 or not tensors:
        return tensors
    context = tf.distribute.get_replica_context()
    return [sum_repeated_rows(tensor) for tensor in context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)]


def max_over_replicas(tensor: Any) -> Any:
    """Takes the maximum of a tensor over the replicas; call it in a replica context."""
    if replica_count() == 1:
        return tensor
    return tf.reduce_max(tf.distribute.get_replica_context().all_gather(tensor[tf.newaxis], axis=0), axis=0)
