"""The middle of every training recipe: `fit`, with its progress, its checkpoints, its history and its end by ctrl-C."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import keras

import keras_mp
from keras_mp.export import in_precision
from keras_mp.parallel import workers
from keras_mp.training import Batches
from keras_mp.training import fit as fit_model
from recipes.common.config import MAY_DIFFER, TrainingConfig
from recipes.common.history import HistoryFile
from recipes.common.interrupt import StopOnInterrupt
from recipes.common.progress import ProgressBar
from recipes.common.require import install_command
from recipes.common.step_timer import StepTimer


class Training(NamedTuple):
    """A training that has ended.

    Args:
        timer: the times of the steps.
        history: the metrics of each epoch.
        interrupted: whether ctrl-C ended it early.
        evaluated: the test metrics in the precision `eval_policy`; empty without one.
    """

    timer: StepTimer
    history: HistoryFile
    interrupted: bool
    evaluated: dict[str, float]


def fit(
    model: keras.Model,
    batches: Batches,
    config: TrainingConfig,
    folder: Path,
    validation_data: Any,
    validation_batch_size: int | None = None,
) -> Training:
    """Trains a compiled model and shows how it goes.

    Args:
        batches: the training data.
        config: the training recipe's config.
        folder: the run's folder, where the checkpoints go, `history.csv`, and the logs for TensorBoard. If it holds
            checkpoints, training goes on from the newest.
        validation_data: the data to test on after each epoch: arrays of inputs and targets, or a
            `keras.utils.PyDataset`.
        validation_batch_size: examples a step of the test, of arrays.

    Returns:
        What was noted on the way.
    """
    timer, history = StepTimer(), HistoryFile(folder / "history.csv")
    checkpoint = keras_mp.TrainingCheckpoint(
        folder / "checkpoints",
        batches,
        every=config.checkpoint_every,
        max_to_keep=2,
        settings=dataclasses.asdict(config),
        ignore_settings=MAY_DIFFER,
        force=config.force,
        callbacks=[history],
    )
    scales = isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    with StopOnInterrupt() as interrupt:
        fit_model(
            model,
            batches,
            config.epochs,
            validation_data,
            validation_batch_size,
            callbacks=[
                # First, because those behind it write what it adds to the logs.
                *([keras_mp.PrecisionMonitor(measure_gradients=False)] if scales else []),
                timer,
                ProgressBar(batches, timer),
                *([_tensorboard(folder)] if config.tensorboard and workers.is_first() else []),
                history,
                interrupt,
                checkpoint,
            ],
        )
    interrupted = workers.any_process(interrupt.interrupted)
    evaluated = {}
    if config.eval_policy is not None and not interrupted:
        other = in_precision(model, config.eval_policy)
        arrays = validation_data if isinstance(validation_data, tuple) else (validation_data, None)
        evaluated = other.evaluate(*arrays, batch_size=validation_batch_size, verbose=0, return_dict=True)
    return Training(timer, history, interrupted, evaluated)


def _tensorboard(folder: Path) -> keras.callbacks.Callback:
    try:
        return keras.callbacks.TensorBoard(str(folder / "tensorboard"), update_freq="epoch")
    except ImportError:
        raise ImportError(
            "Keras writes the logs for TensorBoard with TensorFlow, which is not installed: "
            f"{install_command('tensorflow')}, or leave out --tensorboard"
        ) from None
