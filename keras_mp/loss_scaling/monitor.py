"""`PrecisionMonitor`: shows the loss scale; tells calibration from failure."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_mp.loss_scaling.loss_scale import LossScale, NoLossScale, warn_if_needless
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.rebuild.optimizers import held_optimizers, without_default
from keras_mp.rebuild.walk import compute_dtypes
from keras_mp.system.argument_checks import one_of, whole_number

_UNSCALED = {"loss_scale": 1.0, "skipped_steps": 0}


class PrecisionMonitor(keras.callbacks.Callback):
    """Logs of `fit` about the loss scale.

    They are in `History`, the progress bar, CSV and TensorBoard. Put it before the callbacks that write logs. Of a
    model with several optimizers, as a GAN has, it watches each that is a `LossScaleOptimizer`, and puts the name of
    its attribute before the names, as in `generator_optimizer_loss_scale`. The names it adds:

    - `loss_scale`: what the loss is multiplied by.
    - `skipped_steps`: steps skipped in all, because a gradient was not finite.
    - `gradient_norm`: L2 norm of the last applied gradient over all variables, unscaled and not yet clipped.
    - `gradient_underflow`: share, from 0 to 1, of the last step's nonzero gradient values that, scaled, lie below
      2**-14, where float16 begins to lose bits.

    A few skipped steps at the start are calibration, and are printed once, after the epoch. Many in a row, or one where
    the loss scale is at its floor, constant, or none, are a failure: a warning or an error.

    Args:
        max_consecutive_skips: the number of steps skipped in a row that is too many. From its default start a scale
            reaches its floor in 15.
        on_limit: the answer when that many are reached: "warn", or "raise" to end training.
        measure_gradients: whether to log the last two, too, which cost two passes over the gradients each step.
        every: the number of steps after which the values are read, and at the end of an epoch; in between, the logs
            have the last ones. To read them the program waits for the device, which short steps feel. Skips in a row
            that begin and end between two reads are counted, and not judged.

    Where nothing scales the loss, as `prepare` decides in bfloat16 and float32, the scale is 1, no step is skipped, and
    gradients are not measured: the logs have the first two names, and a line says so.

    Raises:
        ValueError: If an argument is out of its range; in `fit`, if a layer computes in float16 and no optimizer is a
            `LossScaleOptimizer`.
        FloatingPointError: During training, with on_limit="raise".

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
        >>> model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**10), "mse")
        >>> monitor = keras_mp.PrecisionMonitor()
        >>> logs = model.fit(np.zeros((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[monitor]).history
        >>> logs["loss_scale"], logs["skipped_steps"]
        ([1024.0], [0])
    """

    supports_multiprocess = True

    def __init__(
        self, max_consecutive_skips: int = 20, on_limit: str = "warn", *, measure_gradients: bool = True, every: int = 1
    ) -> None:
        super().__init__()
        one_of("on_limit", on_limit, ("warn", "raise"))
        self.max_consecutive_skips = whole_number("max_consecutive_skips", max_consecutive_skips, unit="steps")
        self.on_limit = on_limit
        self.measure_gradients = measure_gradients
        self.every = whole_number("every", every, unit="steps")

    def set_model(self, model: keras.Model) -> None:
        """Lets the model's optimizers measure their gradients.

        Keras calls it before it compiles the step.
        """
        super().set_model(model)
        self._watched = [_Watched(name, optimizer) for name, optimizer in _scaling_optimizers(model).items()]
        for watched in self._watched:
            if watched.optimizer.measures_gradients != self.measure_gradients:
                watched.optimizer.measures_gradients = self.measure_gradients
                model.train_function = None  # Keras's cached step

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes where the scale starts."""
        if not self._watched:
            what = "loss_scale is 1, and gradients are not measured"
            print(f"PrecisionMonitor: nothing scales the loss, and no step is skipped: {what}")
        needless = "float16" not in (dtypes := compute_dtypes(self.model)) and "bfloat16" in dtypes
        for watched in self._watched:
            if needless:
                warn_if_needless(f"model {self.model.name!r}", watched.optimizer.loss_scale)
            watched.start = watched.previous = self._read(watched)
            watched.failed = watched.at_limit = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count the steps."""
        self._due = self.every
        self._unread = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and looks for a failure."""
        self._unread = batch + 1 < self._due
        if not self._unread:
            self._due = batch + 1 + self.every
        for watched in self._watched:
            if not self._unread:
                self._judge(watched, self._read(watched))
            watched.add_to(logs, watched.previous)
        if not self._watched and logs is not None:
            logs.update(_UNSCALED)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and reports the calibration."""
        if not self._watched and logs is not None:
            logs.update(_UNSCALED)
        for watched in self._watched:
            now = self._read(watched)
            watched.add_to(logs, now)
            if self._unread:
                self._judge(watched, now)
            skipped = now["skipped_steps"] - watched.start["skipped_steps"]
            if skipped and not watched.failed:
                print(
                    f"PrecisionMonitor: {watched.says}{skipped} step{'s' if skipped > 1 else ''} skipped in this epoch "
                    f"while the loss scale went from {watched.start['loss_scale']:g} to {now['loss_scale']:g}. That is "
                    "normal: the scale starts high and is halved until the gradients fit."
                )
            watched.start, watched.failed = now, False

    def _read(self, watched: _Watched) -> dict[str, Any]:
        _ = self.model  # on JAX, Keras writes a step's values into the variables when a callback asks for its model
        return watched.read()

    def _judge(self, watched: _Watched, now: dict[str, Any]) -> None:
        skips = int(watched.optimizer.consecutive_skips.numpy())
        failure = watched.failure_at(watched.previous["loss_scale"])
        if skips and failure and not watched.failed:
            self._fail(watched, failure, stop=False)
        too_many = skips >= self.max_consecutive_skips
        if too_many and not watched.at_limit:
            scale = now["loss_scale"]
            self._fail(watched, f"{skips} steps in a row were skipped, and the loss scale is {scale:g}", stop=True)
        watched.at_limit = too_many
        watched.previous = now

    def _fail(self, watched: _Watched, what: str, stop: bool) -> None:
        watched.failed = True
        message = (
            f"{watched.says}{what}. No loss scale helps where the values themselves are not finite. "
            "Look for NaN or inf in the data and the weights, for layers that need float32 (keras_mp.stabilize)"
            " and for a learning rate that is too high. keras_mp.numerics.find_nonfinite(model, batch) names the first "
            "one, and the callback keras_mp.NonFiniteFinder() does so during fit"
        )
        if stop and self.on_limit == "raise":
            raise FloatingPointError(message)
        warnings.warn(message, stacklevel=2)


class _Watched:
    """An optimizer, "" if alone, and what was read of it."""

    def __init__(self, name: str, optimizer: LossScaleOptimizer) -> None:
        self.optimizer = optimizer
        self.says = f"{name}: " if name else ""
        self._prefix = f"{name}_" if name else ""
        self.start: dict[str, Any] = {}
        self.previous: dict[str, Any] = {}
        self.failed = self.at_limit = False

    def failure_at(self, scale: float) -> str:
        """Describes an overflow that does not lower the scale, or ""."""
        loss_scale = self.optimizer.loss_scale
        if isinstance(loss_scale, LossScale):
            at_floor = f"a step overflowed while the loss scale was at its floor, {scale:g}"
            return at_floor if scale == loss_scale.min_scale else ""
        if isinstance(loss_scale, NoLossScale):
            kept = "its weight stayed as it was" if self.optimizer.release_gradients else "the step was skipped"
            return f"a gradient was not finite, {kept}, and nothing scales the loss"
        return f"a step overflowed while the loss scale was constant, {float(loss_scale.initial_state().scale):g}"

    def read(self) -> dict[str, Any]:
        values = {
            "loss_scale": float(self.optimizer.dynamic_scale.numpy()),
            "skipped_steps": int(self.optimizer.skipped_steps.numpy()),
        }
        if self.optimizer.measures_gradients:
            values["gradient_norm"] = float(self.optimizer.gradient_norm.numpy())
            values["gradient_underflow"] = float(self.optimizer.gradient_underflow.numpy())
        return values

    def add_to(self, logs: dict[str, Any] | None, values: dict[str, Any]) -> None:
        if logs is not None:
            logs.update({f"{self._prefix}{name}": value for name, value in values.items()})


def _scaling_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Finds the scaling optimizers by attribute, one alone by ""."""
    optimizers = held_optimizers(model)
    scaling = {name: optimizer for name, optimizer in optimizers.items() if isinstance(optimizer, LossScaleOptimizer)}
    if len(scaling) == 1:
        return {"": next(iter(scaling.values()))}
    scales = any(isinstance(held, keras.optimizers.LossScaleOptimizer) for held in optimizers.values())
    if scaling or not (scales or "float16" in compute_dtypes(model)):
        return scaling
    others = without_default(optimizers)
    names = ", ".join(f"{name} ({type(optimizer).__name__})" for name, optimizer in others.items())
    raise ValueError(
        f"PrecisionMonitor watches a keras_mp.LossScaleOptimizer(optimizer), and the optimizers of model "
        f"{model.name!r}, which scales its loss or computes in float16, are {names}: compile with one, or call "
        "keras_mp.prepare"
    )
