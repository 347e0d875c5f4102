"""`fit` for a model that several processes train: Keras's own where it can, else the kit's loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.conversion.other_precision import precision_of
from keras_mp.parallel import workers
from keras_mp.training.batches import Batches
from keras_mp.training.training_state import build_state, describe

engine = backend.engine_of(__package__)

# Callbacks whose methods read what the loop gives them: logs, the model's variables, `stop_training`.
SUPPORTED = (
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LambdaCallback,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TensorBoard,
)


def fit(
    model: keras.Model,
    batches: Batches,
    epochs: int,
    validation_data: Any = None,
    validation_batch_size: int | None = None,
    callbacks: Sequence[Any] = (),
) -> Any:
    """Trains a compiled model, alone or in several processes.

    Each process reads its rows of every batch. This is Keras's `fit` for a process alone, and on JAX. Several processes
    on TensorFlow need a loop of the kit's own, because Keras's fails under `MultiWorkerMirroredStrategy` (keras#20585):
    there the logs of a step are this process's own, those of an epoch are over all, and only callbacks that are known
    to work are taken.

    Args:
        model: a model that was built and compiled within `keras_mp.parallel.distribute`.
        batches: the training data; the batch size is that of all processes together.
        epochs: the number of passes over the batches.
        validation_data: inputs and targets, as arrays, or a `keras.utils.PyDataset`; the same on all processes.
        validation_batch_size: the number of rows of a test batch, where the data are arrays.
        callbacks: callbacks of the kit, and Keras's CSVLogger, EarlyStopping, History, LambdaCallback,
            ReduceLROnPlateau and TensorBoard; classes of your own that define `supports_multiprocess = True`.

    Returns:
        Keras's History.

    Raises:
        ValueError: If the processes cannot divide a batch, or a callback is not supported.
        ClusterError: If the processes have different models.
    """
    steps = None
    if workers.count() > 1:
        batches.take_share(workers.index(), workers.count())
        build_state(model, batches[0])
        workers.agree("the model", {**describe(model), "precision": precision_of(model)})
        steps = engine.steps_of(model)
    if steps is not None:
        check_callbacks(callbacks)
        rows = validation_batch_size or batches.batch_size
        return _fit_together(model, steps, batches, epochs, validation_data, rows, callbacks)
    callbacks = [*callbacks, _Shares()] if workers.count() > 1 else list(callbacks)
    return model.fit(
        batches,
        epochs=epochs,
        shuffle=False,  # the batches are shuffled; Keras would shuffle their order once more
        validation_data=validation_data,
        validation_batch_size=validation_batch_size,
        verbose=0,
        callbacks=callbacks,
    )


class _Shares(keras.callbacks.Callback):
    """Tells JAX which rows of a batch this process reads.

    They are its own of a training batch, and all of a test batch. One process that wants to stop takes the others with
    it, after the same step. Put it last.
    """

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._model.stop_training = workers.begin_step(bool(self._model.stop_training))

    def on_train_begin(self, logs: Any = None) -> None:
        engine.shards_input(True)

    def on_test_begin(self, logs: Any = None) -> None:
        engine.shards_input(False)

    def on_test_end(self, logs: Any = None) -> None:
        engine.shards_input(True)

    def on_train_end(self, logs: Any = None) -> None:
        engine.shards_input(False)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Checks that the kit's loop knows the callbacks to work."""
    for callback in callbacks:
        if not (isinstance(callback, SUPPORTED) or getattr(callback, "supports_multiprocess", False)):
            names = ", ".join(supported.__name__ for supported in SUPPORTED)
            raise ValueError(
                f"callbacks holds a {type(callback).__name__}, which is not supported when several processes train on "
                f"TensorFlow. Supported: keras_mp's, {names}, and classes that define supports_multiprocess = True"
            )


def _fit_together(
    model: keras.Model,
    steps: Any,
    batches: Batches,
    epochs: int,
    validation_data: Any,
    validation_rows: int,
    callbacks: Sequence[Any],
) -> Any:
    listed = keras.callbacks.CallbackList(
        list(callbacks), add_history=True, model=model, epochs=epochs, steps=batches.steps, verbose=0
    )
    model.stop_training = False
    listed.on_train_begin()
    logs: dict[str, float] = {}
    for epoch in range(model._initial_epoch or 0, epochs):
        model.reset_metrics()
        listed.on_epoch_begin(epoch)
        for index in range(len(batches)):
            listed.on_train_batch_begin(index)
            # One that wants to stop takes the others with it, after the same step.
            step_logs, stops = steps.train(batches[index], workers.begin_step(bool(model.stop_training)))
            model.stop_training = stops
            listed.on_train_batch_end(index, step_logs)
            if stops:
                break
        logs = steps.results()
        if validation_data is not None:
            tested = _test(model, steps, _test_batches(validation_data, validation_rows), listed)
            logs |= {f"val_{name}": value for name, value in tested.items()}
        listed.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_weights)
    listed.on_train_end(logs)
    return model.history


def _test(model: keras.Model, steps: Any, batches: Iterator[Any], listed: Any) -> dict[str, float]:
    model.reset_metrics()
    listed.on_test_begin()
    for batch in batches:
        # A test step waits for nobody, so the processes may have different numbers of rows, and of steps.
        rows = keras.tree.map_structure(lambda array: np.array_split(array, workers.count())[workers.index()], batch)
        if len(keras.tree.flatten(rows)[0]):
            steps.test(rows)
    results: dict[str, float] = steps.results()
    listed.on_test_end(results)
    return results


def _test_batches(data: Any, rows: int) -> Iterator[Any]:
    if isinstance(data, keras.utils.PyDataset):
        for index in range(len(data)):
            yield data[index]
        return
    inputs, targets = data
    for start in range(0, len(inputs), rows):
        yield inputs[start : start + rows], targets[start : start + rows]
