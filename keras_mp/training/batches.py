"""Training batches whose order is a function of the seed and the epoch, so that a training can go on anywhere."""

from __future__ import annotations

import traceback
from typing import Any

import keras
import numpy as np

from keras_mp.system.argument_checks import whole_number


class Batches(keras.utils.PyDataset):
    """Batches of an epoch, from any step on.

    `TrainingCheckpoint` needs them to resume within an epoch. A subclass says what a batch is: `batch(epoch, step)`.
    The examples left over by the last full batch sit out that epoch, so that every step has one shape and compiles
    once. Each pass over the data is the next epoch, unless `start_at` says which: `TrainingCheckpoint` calls it. A
    batch that `fit` reads to build a model is no pass.

    Args:
        examples: the number of training examples.
        batch_size: the number of examples of a step.
        seed: the seed of the order, a whole number of at least 0.

    Raises:
        ValueError: If a batch is larger than the data, or an argument is not such a number.
    """

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        super().__init__()
        self.examples = whole_number("examples", examples, 0)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = whole_number("seed", seed, 0)
        if batch_size > examples:
            raise ValueError(f"batch_size is {batch_size}, but there are only {examples} training examples")
        # One attribute, because a reader in another thread must never see half of a change.
        self._place = (0, 0)
        self._share = (0, 1)
        self._being_read = False
        self._next = 0  # the index of the batch that follows the last one read
        self.in_order = True  # whether batches were read in order, without shuffling
        self._order: tuple[int, Any] = (-1, None)  # of which epoch; one attribute, too

    @property
    def steps(self) -> int:
        """Steps of a whole epoch."""
        return self.examples // self.batch_size

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Sets the epoch and step read next, from 0.

        Call it as an epoch begins; `TrainingCheckpoint` does. Batches before the step are left out of this epoch.

        Raises:
            ValueError: If the epoch or the step is below 0, or the epoch has no such step.
        """
        epoch, step = whole_number("epoch", epoch, 0), whole_number("step", step, 0)
        if step >= self.steps:
            raise ValueError(f"step must be below {self.steps}, the steps of an epoch, got {step}")
        self._place = (epoch, step)
        self._next = 0

    def on_epoch_begin(self) -> None:
        """Begins a pass over the data, before its first batch."""
        self._being_read = not _builds_a_model()
        self.in_order = True

    def on_epoch_end(self) -> None:
        """Ends a pass over the data; Keras calls it.

        At times it calls it twice: the next pass is the next epoch.
        """
        if self._being_read:
            self._being_read = False
            self._place = (self._place[0] + 1, 0)

    @property
    def being_read(self) -> bool:
        """Whether a pass over the data has begun."""
        return self._being_read or self._next > 0

    def take_share(self, index: int, count: int) -> None:
        """Lets process `index` of `count` read its part only.

        Raises:
            ValueError: If the processes cannot divide a batch.
        """
        if self.batch_size % count:
            raise ValueError(
                f"batch_size is {self.batch_size}, which {count} processes cannot divide: give a multiple of {count}"
            )
        self._share = (index, count)

    def signature(self) -> dict[str, Any]:
        """Settings that the order of the data depends on.

        A resumed training must have the same.
        """
        return {"examples": self.examples, "batch_size": self.batch_size, "seed": self.seed}

    def order(self, epoch: int) -> np.ndarray:
        """Draws the order of an epoch, counted from 0.

        Returns:
            The permutation of `range(examples)`, int64, that NumPy's generator draws from the seed `(seed, epoch)`.
            That of the last epoch asked for is kept.
        """
        drawn, order = self._order
        if drawn != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.examples)
            self._order = (epoch, order)
        return order

    def batch(self, epoch: int, step: int) -> Any:
        """Reads a batch; the same arguments give the same batch.

        Args:
            epoch: the number of the epoch, counted from 0.
            step: the number of the batch in the epoch, counted from 0.

        Returns:
            What `fit` takes: `(inputs, targets)`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define batch(epoch, step)")

    def rows(self, epoch: int, step: int, first: int, last: int) -> Any:
        """Reads the rows `first` to `last - 1`, perhaps alone."""
        return keras.tree.map_structure(lambda array: array[first:last], self.batch(epoch, step))

    def __len__(self) -> int:
        return self.steps - self._place[1]

    def __getitem__(self, index: int) -> Any:
        # The first ones are read again, where TensorFlow looks at their shapes. Several workers read as they please.
        self.in_order &= index in (0, self._next) or self.workers > 1
        self._next = index + 1
        epoch, first = self._place
        share, count = self._share
        if count == 1:
            return self.batch(epoch, first + index)
        rows = self.batch_size // count
        return self.rows(epoch, first + index, share * rows, (share + 1) * rows)


def _builds_a_model() -> bool:
    """Tells whether Keras reads a batch to build a model."""
    # Private: a data set is not told what its batch is for. After this one Keras begins the pass anew.
    return any(frame.f_code.co_name == "_symbolic_build" for frame, _ in traceback.walk_stack(None))


class ShuffledBatches(Batches):
    """Arrays in memory, in another order each epoch.

    The order of epoch e is the permutation that NumPy's generator draws from the seed `(seed, e)`: the same on every
    backend, and the same whether the epochs before it were run or not.

    Args:
        inputs: an array of shape `(examples, ...)`; anything that NumPy's indices work on.
        targets: an array of as many examples.
        batch_size: the number of examples of a step.
        seed: the seed of the order, a whole number of at least 0.

    Raises:
        ValueError: If inputs and targets differ in number, and where `Batches` raises it.
    """

    def __init__(self, inputs: Any, targets: Any, batch_size: int, seed: int) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"inputs has {len(inputs)} examples and targets {len(targets)}: each needs a target")
        super().__init__(len(inputs), batch_size, seed)
        self.inputs, self.targets = inputs, targets

    def batch(self, epoch: int, step: int) -> Any:
        return self.rows(epoch, step, 0, self.batch_size)

    def rows(self, epoch: int, step: int, first: int, last: int) -> Any:
        chosen = self.order(epoch)[step * self.batch_size + first : step * self.batch_size + last]
        return self.inputs[chosen], self.targets[chosen]
