"""Training batches whose order is a function of the seed and the epoch."""

import keras
import numpy as np


class ShuffledBatches(keras.utils.PyDataset):
    """Arrays in memory, in batches, in another order each epoch.

    The order of epoch e is the permutation that NumPy's generator draws from the seed `(seed, e)`: the same on every
    backend, and the same whether the epochs before it were run or not. The examples left over by the last full batch
    sit out that epoch, so that every step has one shape and compiles once.

    Args:
        images: array, shape `(examples, ...)`.
        labels: array, shape `(examples,)`.
        batch_size: examples a step.
        seed: a whole number, at least 0.

    Raises:
        ValueError: for a batch larger than the data.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int):
        super().__init__()
        if batch_size > len(images):
            raise ValueError(f"batch_size is {batch_size}, but there are only {len(images)} training examples")
        self.images, self.labels, self.batch_size, self.seed = images, labels, batch_size, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draws the order of an epoch. Call it as the epoch begins: Keras's own hook is called while building too."""
        self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.images))

    def __len__(self):
        return len(self.images) // self.batch_size

    def __getitem__(self, step):
        chosen = self.order[step * self.batch_size : (step + 1) * self.batch_size]
        return self.images[chosen], self.labels[chosen]
