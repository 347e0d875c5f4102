"""The progress of a training: a live bar on a terminal, and a line an epoch everywhere."""

import time

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from recipes.common.step_timer import StepTimer


class ProgressBar(keras.callbacks.Callback):
    """Shows where the training is, its metrics, its speed, and the time left, all without the compilation.

    Args:
        batch_size: examples a step.
        timer: the timer of the same fit; put it before this callback.
        console: where to write; the standard output by default.
    """

    def __init__(self, batch_size: int, timer: StepTimer, console: Console | None = None):
        super().__init__()
        self.batch_size, self.timer, self.console = batch_size, timer, console or Console()
        self.first_step_ended: float | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def on_train_begin(self, logs=None):
        self.task = self.bar.add_task("compiling", total=self.params["steps"], text="")
        self.bar.start()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.bar.reset(self.task)

    def on_train_batch_end(self, batch, logs=None):
        if self.first_step_ended is None:
            self.first_step_ended = time.perf_counter()
            self.steps_done = 0
        else:
            self.steps_done += 1
        self.bar.update(self.task, completed=batch + 1, description=self._epoch(), text=self._text(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.console.print(f"{self._epoch()}  {self._text(logs)}", soft_wrap=True, highlight=False)

    def on_train_end(self, logs=None):
        self.bar.stop()

    def seconds_left(self) -> float | None:
        """Time since the first step ended, a step, times the steps left; what lies between epochs is in it."""
        if self.first_step_ended is None or self.steps_done == 0:
            return None
        total = self.params["epochs"] * self.params["steps"]
        return (time.perf_counter() - self.first_step_ended) / self.steps_done * (total - 1 - self.steps_done)

    def _epoch(self):
        return f"epoch {self.epoch + 1:>{len(str(self.params['epochs']))}}/{self.params['epochs']}"

    def _text(self, logs):
        parts = [f"{readable(name)} {float(value):.4f}" for name, value in logs.items()]
        if self.timer.step_seconds:
            parts.append(f"{self.batch_size / self.timer.step_seconds:.0f} samples/s")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"{left / 60:.0f}:{left % 60:02.0f} left" if left >= 0.5 else "done")
        return "  ".join(parts)


def readable(name: str) -> str:
    """Keras's name of a metric in words: its validation data are our test split."""
    return f"test {name[4:]}" if name.startswith("val_") else name
