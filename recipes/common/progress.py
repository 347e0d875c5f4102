"""The progress of a training: a live bar on a terminal, and a line an epoch everywhere."""

import time

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from keras_mp.parallel import workers
from keras_mp.training import Batches
from recipes.common.step_timer import StepTimer

# Numbers that are counts or powers of two, whatever their type.
WHOLE = ("loss_scale", "skipped_steps")


class ProgressBar(keras.callbacks.Callback):
    """Shows the epoch and the step, the metrics, the speed, and the time left, all without the compilation.

    In float16 the loss scale and the skipped steps are among the metrics. A resumed epoch goes on at its step.

    Args:
        batches: the training data of the same fit.
        timer: the timer of the same fit; put it before this callback.
        console: the console to write to; the standard output by default, of the first of several processes.
    """

    supports_multiprocess = True

    def __init__(self, batches: Batches, timer: StepTimer, console: Console | None = None):
        super().__init__()
        self.batches, self.timer, self.console = batches, timer, console or Console(quiet=not workers.is_first())
        self.last_step_ended: float | None = None
        self.steps_done = 0
        # Seconds from one step's end to the next one's: within an epoch, and with what lies between two epochs.
        self.within, self.between = _Mean(), _Mean()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def on_train_begin(self, logs=None):
        self.task = self.bar.add_task("compiling", total=self.batches.steps, text="")
        self.bar.start()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.begins = epoch, True
        self.bar.reset(self.task)

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self.last_step_ended is not None:
            self.steps_done += 1
            (self.between if self.begins else self.within).add(now - self.last_step_ended)
        self.last_step_ended, self.begins = now, False
        # Fewer than all steps are read of an epoch that was resumed.
        self.step = self.batches.steps - len(self.batches) + batch + 1
        steps = f"{self.step:>{len(str(self.batches.steps))}}/{self.batches.steps}"
        text = f"{steps}  {'  '.join(self._parts(logs))}"
        self.bar.update(self.task, completed=self.step, description=self._epoch(), text=text)

    def on_epoch_end(self, epoch, logs=None):
        start = f"{self._epoch()}  "
        self.console.print(start + fitted(self._parts(logs), self.console.width, len(start)), highlight=False)

    def on_train_end(self, logs=None):
        self.bar.stop()

    def seconds_left(self) -> float | None:
        """Seconds a step, times the steps left, and what lies between epochs, times the epochs left.

        Neither the first of the steps nor the first of the tests counts, which compile, where there is another.
        """
        step = self.within.value()
        if step is None:
            return None
        epochs = self.params["epochs"] - self.epoch - 1
        left = (epochs + 1) * self.batches.steps - self.step
        pause = max(0.0, self.between.value() - step) if self.between.count > 1 else 0.0
        return step * left + pause * epochs

    def _epoch(self):
        return f"epoch {self.epoch + 1:>{len(str(self.params['epochs']))}}/{self.params['epochs']}"

    def _parts(self, logs):
        parts = [written(name, float(value)) for name, value in logs.items()]
        if self.timer.step_seconds:
            parts.append(f"{self.batches.batch_size / self.timer.step_seconds:.0f} samples/s")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"{left / 60:.0f}:{left % 60:02.0f} left" if left >= 0.5 else "done")
        return parts


class _Mean:
    """The mean of numbers without the first, where there is another."""

    def __init__(self) -> None:
        self.first = self.rest = 0.0
        self.count = 0

    def add(self, number: float) -> None:
        if self.count:
            self.rest += number
        else:
            self.first = number
        self.count += 1

    def value(self) -> float | None:
        return self.rest / (self.count - 1) if self.count > 1 else self.first if self.count else None


def fitted(parts: list[str], width: int, start: int) -> str:
    """The parts on one line, or, where that is too long, on as many as they need.

    Args:
        parts: parts of a line, none of which is divided.
        width: the width of the terminal, in characters.
        start: the number of characters before the first part; later lines begin under it.
    """
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if lines[-1] and start + len(longer) > width:
            lines.append(part)
        else:
            lines[-1] = longer
    return f"\n{' ' * start}".join(lines)


def written(name: str, value: float) -> str:
    """A metric in words, by Keras's name of it: its validation data are our test split."""
    if name in WHOLE:
        return f"{name.replace('_', ' ')} {value:g}"
    return f"{f'test {name[4:]}' if name.startswith('val_') else name} {value:.4f}"
