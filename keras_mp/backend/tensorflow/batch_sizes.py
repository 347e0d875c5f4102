"""The batch sizes that the islands of a step are compiled for: not more than a few, because each costs a compile."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.islands import has_islands
from keras_mp.backend.tensorflow.programs import programs_if

MOST = 16
_FACTOR = 1_000_003  # a prime
_NONE = -1  # no size


def count_batch_sizes() -> Callable[[Any], AbstractContextManager[None]]:
    """Starts to count the batch sizes of a model's steps.

    Returns:
        A function of a batch, a structure of tensors, that returns a scope for tracing the step on it. Within it,
        islands are compiled for the first `MOST` batch sizes.
    """
    return BatchSizes().of_step


class BatchSizes:
    """Counts the batch sizes of one model's steps.

    A batch of several inputs, such as nodes and edges of graphs, has the sizes of all of them together.

    Args:
        most: for so many the islands are compiled; in a batch of another size their operations run as kernels.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._counted: tf.lookup.experimental.MutableHashTable | None = None

    @contextmanager
    def of_step(self, batch: Any) -> Iterator[None]:
        """Within it, a step on a batch is traced; it does nothing where the sizes are known or no islands may be.

        Args:
            batch: a structure of tensors.
        """
        sizes = [tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch) if _has_open_size(leaf)] if has_islands() else []
        with programs_if(self._count(sizes)) if sizes else nullcontext():
            yield

    def _count(self, sizes: list[tf.Tensor]) -> tf.Tensor:
        """Whether programs are compiled for these sizes: a boolean tensor of shape ()."""
        if self._counted is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._counted = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)
                self._counted.insert([_NONE], [1])
        key = tf.constant([0], tf.int64)
        for size in sizes:
            key = key * _FACTOR + tf.cast(size, tf.int64)
        known = (self._counted.lookup(key) > 0) | (self._counted.size() <= self._most)
        self._counted.insert(tf.where(known, key, _NONE), [1])
        return known[0]


def _has_open_size(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] is None
