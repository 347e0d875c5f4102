"""A callback that finds nonfinite values in training."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.numerics.data import dense_array, named_arrays
from keras_mp.numerics.nonfinite import NonFinite, find_nonfinite
from keras_mp.system.argument_checks import whole_number
from keras_mp.system.atomic_write import atomic_write


class NonFiniteFinder(keras.callbacks.Callback):
    """Runs `find_nonfinite` when a training breaks.

    That is when the loss of `fit` becomes NaN or infinite, or too many steps in a row are skipped. It writes the batch
    to `FOLDER/nonfinite_step_N.npz`, prints what it found and keeps it in `found`. The weights are looked at as they
    were before the step, so it keeps a copy of them on the device where the optimizer applies what is not finite: that
    is every optimizer but a loss-scaling one. The batches of `fit` pass through Python one by one.

    Args:
        folder: the folder to write the batch to; made when it is needed.
        max_consecutive_skips: the number of skipped steps in a row that is too many, as for `PrecisionMonitor`.
        stop: whether to end training.

    Attributes:
        found: the `NonFinite`, or None.
        path: the path of the written batch, or None; `keras-mp audit --data` and `numpy.load` read it. Its arrays are
            named x, y and sample_weight, or one of several x/NAME or x/0.

    Raises:
        ValueError: If an argument is out of its range.

    Warns:
        UserWarning: If a value is not finite; the message says what was found.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> finder = keras_mp.NonFiniteFinder("nonfinite")  # writes there what it finds, and ends the training
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[finder])
    """

    def __init__(self, folder: str | Path = "nonfinite", max_consecutive_skips: int = 20, *, stop: bool = True) -> None:
        super().__init__()
        self.max_consecutive_skips = whole_number("max_consecutive_skips", max_consecutive_skips, unit="steps")
        self.folder, self.stop = Path(folder), stop
        self.found: NonFinite | None = None
        self.path: Path | None = None
        self._step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look at the batches that pass."""
        self._batches: list[Any] = []
        self._plain = self.model.train_function
        self.model.train_function = self._watched(self._plain)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts back the step of `fit`."""
        self.model.train_function = self._plain

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        model = self.model  # on JAX, to ask a callback for its model during a step would put the old values back

        def watched(*arguments: Any) -> Any:
            *state, iterator = arguments
            self._batches = _taken(iterator, model.steps_per_execution)
            return step(*state, iter(self._batches))

        return watched

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Copies what the step may spoil."""
        optimizer = self.model.optimizer
        kept = list(self.model.non_trainable_variables)
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            kept += self.model.trainable_variables
        elif getattr(optimizer, "dynamic_scale", None) is not None:
            kept.append(optimizer.dynamic_scale)
        self._before = [(variable, keras.ops.copy(variable.value)) for variable in kept]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the finder where the loss or skips are wrong."""
        self._step += 1
        if self.found is not None:
            return
        optimizer = self.model.optimizer
        skips = int(optimizer.consecutive_skips.numpy()) if isinstance(optimizer, LossScaleOptimizer) else 0
        loss = float((logs or {}).get("loss", 0.0))
        # A skipped step is the loss scale's affair until there are too many.
        if skips >= self.max_consecutive_skips or (not skips and not math.isfinite(loss)):
            self._find()

    def _find(self) -> None:
        after = [(variable, keras.ops.copy(variable.value)) for variable, _ in self._before]
        try:
            for variable, value in self._before:
                variable.assign(value)
            for batch in map(keras.utils.unpack_x_y_sample_weight, self._batches):
                self.found = find_nonfinite(self.model, batch)
                if self.found is not None:
                    break
        finally:
            for variable, value in after:
                variable.assign(value)
        self.path = self._write(batch)
        finding = self.found or "the step is finite when it is run again: dropout or augmentation drew other numbers"
        warnings.warn(f"step {self._step}: {finding}\nThe batch is in {self.path}", stacklevel=2)
        if self.stop:
            self.model.stop_training = True

    def _write(self, batch: tuple) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"nonfinite_step_{self._step}.npz"
        arrays: dict[str, Any] = {name: _storable(array) for name, array in named_arrays(batch).items()}
        with atomic_write(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays)
        return path


def _taken(iterator: Iterator[Any], count: int) -> list[Any]:
    batches = list(itertools.islice(iterator, count))
    if not batches:
        raise StopIteration
    return batches


def _storable(leaf: Any) -> np.ndarray:
    """An array that numpy.load reads: TensorFlow's strings are Python objects."""
    array = dense_array(leaf)
    if array.dtype != object:
        return array
    texts = [text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in array.flat]
    return np.array(texts, dtype=str).reshape(array.shape)
