import io

import keras
import numpy as np
from rich.console import Console

from recipes.common.progress import ProgressBar
from recipes.common.step_timer import StepTimer


def printed(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    timer = StepTimer()
    bar = ProgressBar(2, timer, console)
    model.fit(*data, batch_size=2, epochs=3, validation_data=data, verbose=0, callbacks=[timer, bar])
    return output.getvalue(), bar


def test_without_a_terminal_it_is_a_line_an_epoch():
    text, _ = printed(terminal=False)
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all("loss" in line and "test loss" in line and "samples/s" in line for line in lines)
    assert lines[-1].endswith("done")


def test_on_a_terminal_there_is_a_bar_too():
    text, _ = printed(terminal=True)
    assert "━" in text
    assert "epoch 3/3" in text


def test_the_time_left_is_none_at_the_start_and_zero_at_the_end():
    assert ProgressBar(2, StepTimer()).seconds_left() is None
    assert printed(terminal=False)[1].seconds_left() == 0
