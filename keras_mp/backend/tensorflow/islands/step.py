"""The training step of a prepared model on a CPU, and the batch sizes that its islands are compiled for."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.tensorflow.islands.activations import Gelu, gelu_by, silu
from keras_mp.backend.tensorflow.islands.product_gradients import add, conv
from keras_mp.backend.tensorflow.islands.programs import has_islands, programs_if

# Each size costs a compile.
MOST = 16
_FACTOR = 1_000_003  # a prime
_NONE = -1  # no size


def step_scopes(gelu: Gelu) -> Callable[[Any], AbstractContextManager[None]]:
    """Makes the scopes in which a model's training steps are traced, one after the other.

    Within one, Keras's GELU and SiLU are islands, convolutions of small images and additions of a bias have gradients
    that are products, and islands are compiled for the first `MOST` batch sizes of the model.

    Args:
        gelu: `gelu(x, approximate)`, by jitted programs, one forward and one backward.

    Returns:
        A function of a step's batch, a structure of tensors, that returns its scope.
    """
    sizes = BatchSizes()
    replacements = {
        "keras.src.backend.nn.conv": conv,
        "keras.src.backend.nn.gelu": gelu_by(gelu),
        "keras.src.backend.nn.silu": silu,
        "keras.src.backend.numpy.add": add,
    }

    @contextmanager
    def scope(batch: Any) -> Iterator[None]:
        with patched(replacements), sizes.of_step(batch):
            yield

    return scope


class BatchSizes:
    """Counts the batch sizes of one model's steps.

    A batch of several inputs, such as nodes and edges of graphs, has the sizes of all of them together.

    Args:
        most: the number of sizes for which the islands are compiled; in a batch of another size their operations run as
            kernels.
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
