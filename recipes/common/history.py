"""The history of a training as a CSV file, up to date after each epoch."""

import csv
import time
from pathlib import Path

import keras

from keras_mp.training import atomic_write


class HistoryFile(keras.callbacks.Callback):
    """Collects a row an epoch: epoch (from 1), `train_` and `test_` metrics, seconds; rewrites the file each time.

    An epoch without a metric that another epoch has leaves its column empty.

    Args:
        path: the CSV file.
    """

    supports_multiprocess = True

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.rows: list[dict[str, float]] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        metrics = {_column(name): float(value) for name, value in logs.items()}
        self.rows.append({"epoch": epoch + 1, **metrics, "seconds": round(time.perf_counter() - self._start, 3)})
        # A training that resumes with other settings has other metrics: those of every row, the seconds last.
        columns = dict.fromkeys(name for row in self.rows for name in row if name != "seconds")
        with atomic_write(self.path) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns, "seconds"])
            writer.writeheader()
            writer.writerows(self.rows)


def _column(name):
    """Keras calls the second data set validation; ours is the test split."""
    return f"test_{name[4:]}" if name.startswith("val_") else f"train_{name}"
