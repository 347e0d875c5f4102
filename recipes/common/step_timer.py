"""How long a training step takes, without the compilation."""

import statistics
import time

import keras


class StepTimer(keras.callbacks.Callback):
    """Measures each training step from its start until its loss is known on the host.

    The first step compiles, so it does not count. Reading the loss waits for the device: without it, a backend that
    runs ahead would be timed at handing over the work, not at doing it.
    """

    supports_multiprocess = True

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self.compile_seconds: float | None = None

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        elapsed = time.perf_counter() - self._start
        if self.compile_seconds is None:
            self.compile_seconds = elapsed
        else:
            self.seconds.append(elapsed)

    @property
    def step_seconds(self) -> float | None:
        """Median seconds a step; None before the second step."""
        return statistics.median(self.seconds) if self.seconds else None
