import io

import keras
import numpy as np
from rich.console import Console

from keras_mp.training.batches import ShuffledBatches
from recipes.common import progress
from recipes.common.progress import ProgressBar, fitted, written
from recipes.common.step_timer import StepTimer

X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


def test_without_a_terminal_it_is_a_line_an_epoch():
    output = io.StringIO()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    timer, batches = StepTimer(), ShuffledBatches(X, Y, 2, seed=0)
    bar = ProgressBar(batches, timer, Console(file=output, force_terminal=False, width=200))
    model.fit(batches, epochs=3, shuffle=False, validation_data=(X, Y), verbose=0, callbacks=[timer, bar])
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all("loss" in line and "test loss" in line and "samples/s" in line for line in lines)
    assert lines[-1].endswith("done")


def test_a_line_is_as_wide_as_the_terminal():
    metrics = ["loss 0.1234", "accuracy 0.9876", "test loss 0.1234", "test accuracy 0.9876", "1234 samples/s"]
    assert fitted(metrics, 200, 13) == "  ".join(metrics)
    lines = ("epoch 20/20  " + fitted([*metrics, "0:34 left"], 80, 13)).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 2 and lines[1].startswith(" " * 13)
    assert "  ".join(line.strip() for line in lines) == "  ".join(["epoch 20/20", *metrics, "0:34 left"])


def test_the_time_left_after_a_resume_leaves_out_what_compiles(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    batches = ShuffledBatches(np.ones((100, 2)), np.ones((100, 1)), 1, seed=0)
    bar = ProgressBar(batches, StepTimer(), Console(file=io.StringIO()))
    bar.set_params({"epochs": 4})
    bar.on_train_begin()
    left = []
    for epoch, first in ((1, 90), (2, 0), (3, 0)):
        batches.start_at(epoch, first)
        bar.on_epoch_begin(epoch)
        for batch in range(len(batches)):
            clock[0] += 8.0 if (epoch, batch) == (1, 0) else 0.1
            bar.on_train_batch_end(batch, {"loss": 1.0})
        clock[0] += 5.0 if epoch == 1 else 1.0  # the first test compiles
        bar.on_epoch_end(epoch, {"loss": 1.0})
        left.append(bar.seconds_left())
    # 200 steps, without a test that takes as long as it does compiled; then 100 steps; then none.
    np.testing.assert_allclose(left, [20.0, 10.0, 0.0], rtol=1e-9, atol=1e-9)


def test_the_loss_scale_is_a_plain_number():
    assert written("loss_scale", 32768.0) == "loss scale 32768"
    assert written("skipped_steps", 3.0) == "skipped steps 3"
    assert written("loss", 0.5) == "loss 0.5000" and written("val_accuracy", 1.0) == "test accuracy 1.0000"


def test_the_live_line_has_the_step_and_the_time_left():
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((bar.bar.tasks[0].fields["text"], bar.bar.tasks[0].completed, bar.seconds_left()))

    seen = []
    timer, batches = StepTimer(), ShuffledBatches(X, Y, 2, seed=0)
    bar = ProgressBar(batches, timer, Console(file=io.StringIO(), force_terminal=True, width=200))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=[timer, bar, Look()])
    assert [text.split("  ")[0] for text, _, _ in seen] == ["1/4", "2/4", "3/4", "4/4"] * 2
    assert all("samples/s" in text for text, _, _ in seen[1:])
    assert seen[0][2] is None and all(left > 0 for _, _, left in seen[1:-1]) and seen[-1][2] == 0
