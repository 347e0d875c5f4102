"""A callback that shows the loss scale at work, and tells calibration from failure."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_mp.loss_scaling.loss_scale import LossScale, warn_if_needless
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.wrap_optimizer import compute_dtypes


class PrecisionMonitor(keras.callbacks.Callback):
    """Adds what the loss scale does to the logs of `fit`: `History`, the progress bar, CSV, TensorBoard.

    Put it before the callbacks that write logs. The names it adds:

    - `loss_scale`: what the loss is multiplied by.
    - `skipped_steps`: steps skipped in all, because a gradient was not finite.
    - `gradient_norm`: L2 norm of the last applied gradient over all variables, unscaled and not yet clipped.
    - `gradient_underflow`: share, from 0 to 1, of the last step's nonzero gradient values that, scaled, lie below
      2**-14, where float16 begins to lose bits.

    A few skipped steps at the start are the scale finding its place: they are printed once, after the epoch. Many in a
    row, or one while the scale is at its floor, are a failure: that is a warning, or an error.

    Args:
        max_consecutive_skips: steps skipped in a row that are too many. From its default start a scale reaches its
            floor in 15.
        on_limit: "warn", or "raise" to end training when they are reached.
        measure_gradients: also log the last two, which cost two passes over the gradients each step.
        every: read the values after so many steps, and at the end of an epoch; in between, the logs have the last ones.
            To read them the program waits for the device, which short steps feel. Skips in a row that begin and end
            between two reads are counted, and not judged.

    Raises:
        ValueError: If an argument is out of its range, or the model's optimizer is not a `LossScaleOptimizer`.
        FloatingPointError: During training, with on_limit="raise".
    """

    works_together = True

    def __init__(
        self,
        max_consecutive_skips: int = 20,
        on_limit: str = "warn",
        *,
        measure_gradients: bool = True,
        every: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("max_consecutive_skips", max_consecutive_skips), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be a whole number of steps")
            if value < 1:
                raise ValueError(f"{name}={value!r} must be 1 or more")
        if on_limit not in ("warn", "raise"):
            raise ValueError(f"on_limit={on_limit!r} must be 'warn' or 'raise'")
        self.max_consecutive_skips = max_consecutive_skips
        self.on_limit = on_limit
        self.measure_gradients = measure_gradients
        self.every = every

    def set_model(self, model: Any) -> None:
        """Makes the model's optimizer measure its gradients; Keras calls it before it compiles the step."""
        super().set_model(model)
        optimizer = self._optimizer
        if optimizer.measures_gradients != self.measure_gradients:
            optimizer.measures_gradients = self.measure_gradients
            model.train_function = None  # Keras's cached step

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes where the scale starts."""
        if "float16" not in (dtypes := compute_dtypes(self.model)) and "bfloat16" in dtypes:
            warn_if_needless(f"model {self.model.name!r}", self._optimizer.loss_scale)
        self._start = self._previous = self._read()
        self._failed = self._at_limit = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count the steps."""
        self._due = self.every
        self._unread = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and looks for a failure."""
        self._unread = batch + 1 < self._due
        if self._unread:
            _add(logs, self._previous)
            return
        self._due = batch + 1 + self.every
        now = self._read()
        _add(logs, now)
        self._judge(now)

    def _judge(self, now: dict[str, Any]) -> None:
        skips = int(self._optimizer.consecutive_skips.numpy())
        if skips and self._previous["loss_scale"] == self._floor and not self._failed:
            self._fail(f"a step overflowed while the loss scale was at its floor, {self._floor:g}", stop=False)
        if skips >= self.max_consecutive_skips and not self._at_limit:
            self._fail(f"{skips} steps in a row were skipped, and the loss scale is {now['loss_scale']:g}", stop=True)
        self._at_limit = skips >= self.max_consecutive_skips
        self._previous = now

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and reports the calibration."""
        now = self._read()
        _add(logs, now)
        if self._unread:
            self._judge(now)
        skipped = now["skipped_steps"] - self._start["skipped_steps"]
        if skipped and not self._failed:
            print(
                f"PrecisionMonitor: {skipped} step{'s' if skipped > 1 else ''} skipped in this epoch while the loss "
                f"scale went from {self._start['loss_scale']:g} to {now['loss_scale']:g}. That is calibration: the "
                "scale starts high and backs off until the gradients fit."
            )
        self._start, self._failed = now, False

    @property
    def _optimizer(self) -> LossScaleOptimizer:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(
                f"the optimizer of model {self.model.name!r} is {type(optimizer).__name__}, which PrecisionMonitor "
                "cannot watch: compile with keras_mp.LossScaleOptimizer(optimizer)"
            )
        return optimizer

    @property
    def _floor(self) -> float | None:
        loss_scale = self._optimizer.loss_scale
        return loss_scale.min_scale if isinstance(loss_scale, LossScale) else None

    def _read(self) -> dict[str, Any]:
        optimizer = self._optimizer
        values = {
            "loss_scale": float(optimizer.dynamic_scale.numpy()),
            "skipped_steps": int(optimizer.skipped_steps.numpy()),
        }
        if self.measure_gradients:
            values["gradient_norm"] = float(optimizer.gradient_norm.numpy())
            values["gradient_underflow"] = float(optimizer.gradient_underflow.numpy())
        return values

    def _fail(self, what: str, stop: bool) -> None:
        self._failed = True
        message = (
            f"{what}. That is no calibration: no scale helps where the values themselves are not finite. Look for NaN "
            "or inf in the data and the weights, for layers that need float32 (keras_mp.stabilize), and for a "
            "learning rate that is too high. keras_mp.find_nonfinite(model, batch) names the first such value, and "
            "the callback keras_mp.NonFiniteFinder() does so during fit"
        )
        if stop and self.on_limit == "raise":
            raise FloatingPointError(message)
        warnings.warn(message, stacklevel=2)


def _add(logs: dict[str, Any] | None, values: dict[str, Any]) -> None:
    if logs is not None:
        logs.update(values)
