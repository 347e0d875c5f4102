"""The loss of each step of a training."""

from __future__ import annotations

import keras
import numpy as np


class StepLosses(keras.callbacks.Callback):
    """Notes the loss of each step of an epoch, from the running mean that Keras reports."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict) -> None:
        self._means.append(logs["loss"])

    def last(self, count: int) -> float:
        """The mean of the last so many steps."""
        totals = np.array(self._means, "float64") * np.arange(1, len(self._means) + 1)
        return float((totals[-1] - totals[-1 - count]) / count)
