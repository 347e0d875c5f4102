"""The middle of every recipe: the training, with its progress, its timing, its history and its end by ctrl-C."""

from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from keras_mp.batches import ShuffledBatches
from recipes.common.history import HistoryFile
from recipes.common.interrupt import StopOnInterrupt
from recipes.common.progress import ProgressBar
from recipes.common.step_timer import StepTimer


class Training(NamedTuple):
    """A training that has ended.

    Args:
        timer: what a step took.
        history: the metrics of each epoch.
        interrupted: whether ctrl-C ended it early.
    """

    timer: StepTimer
    history: HistoryFile
    interrupted: bool


def fit(
    model: keras.Model,
    batches: ShuffledBatches,
    epochs: int,
    folder: Path,
    validation_data: tuple[np.ndarray, np.ndarray],
    validation_batch_size: int,
) -> Training:
    """Trains a compiled model and shows how it goes.

    Args:
        model: the model.
        batches: the training data.
        epochs: passes over them.
        folder: the run's folder, where `history.csv` goes.
        validation_data: inputs and targets to test on after each epoch.
        validation_batch_size: examples a step of the test.

    Returns:
        What was noted on the way.
    """
    timer, history = StepTimer(), HistoryFile(folder / "history.csv")
    with StopOnInterrupt() as interrupt:
        model.fit(
            batches,
            epochs=epochs,
            shuffle=False,  # the batches are shuffled; Keras would shuffle their order once more
            validation_data=validation_data,
            validation_batch_size=validation_batch_size,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: batches.start_at(epoch)),
                timer,
                ProgressBar(batches.batch_size, timer),
                history,
                interrupt,
            ],
        )
    return Training(timer, history, interrupt.interrupted)
