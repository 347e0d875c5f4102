"""Batches of a tf.data pipeline that can begin anywhere in an epoch, and are the same each time."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_mp.training import Batches


class StreamedBatches(Batches):
    """Batches that are read one after the other, and from any other place by opening the stream there.

    Keras reads the first two batches twice, and TensorFlow reads ahead in a thread of its own: whoever asks for a
    place that is not the next one reopens the stream, which is right for both, if slower.

    Args:
        examples: the number of training examples.
        batch_size: examples a step.
        seed: a whole number, at least 0.
        opened: a function from an epoch and a step to an iterator over the batches from there on.

    Raises:
        ValueError: as `Batches`.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, opened: Callable[[int, int], Iterator[Any]]) -> None:
        super().__init__(examples, batch_size, seed)
        self._opened = opened
        self._lock = threading.Lock()
        self._stream: Iterator[Any] = iter(())
        self._next: tuple[int, int] | None = None

    def batch(self, epoch: int, step: int) -> Any:
        with self._lock:
            if self._next != (epoch, step):
                self._stream = self._opened(epoch, step)
            # Not known while reading: an error must not leave a wrong place behind.
            self._next = None
            batch = next(self._stream)
            self._next = (epoch, step + 1)
            return batch


def keys(seed: int, epoch: int) -> np.ndarray:
    """Draws the seeds of an epoch's random operations.

    Args:
        seed: a whole number, at least 0.
        epoch: the number of the epoch, counted from 0.

    Returns:
        Four int64 numbers between 0 and 2**31, far apart for neighbouring seeds and epochs.
    """
    return (np.random.SeedSequence((seed, epoch)).generate_state(4) >> 1).astype(np.int64)


def in_order_of(key: int, read: Callable[[], Any]) -> Any:
    """A tf.data pipeline whose shuffling depends on its own seeds only, not on TensorFlow's global one.

    Args:
        key: the number that stands in for the global seed.
        read: a function that makes the pipeline; it sets the seed of each of its random operations.

    Returns:
        The pipeline.
    """
    import tensorflow as tf

    def with_seed(_: Any) -> Any:
        # Within a function this sets the seed of that function.
        tf.random.set_seed(key)
        return read()

    return tf.data.Dataset.from_tensors(0).flat_map(tf.autograph.experimental.do_not_convert(with_seed))
