import signal

import keras
import numpy as np
import pytest

from recipes.common.interrupt import StopOnInterrupt


class InterruptAt(keras.callbacks.Callback):
    def __init__(self, step, number):
        super().__init__()
        self.step, self.number, self.steps = step, number, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_stops_after_the_step_and_the_model_is_whole(tmp_path, number):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = signal.getsignal(number)
    ctrl_c = InterruptAt(5, number)
    with StopOnInterrupt() as interrupt:
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, epochs=9, verbose=0, callbacks=[ctrl_c, interrupt])
    assert interrupt.interrupted and ctrl_c.steps == 5
    assert signal.getsignal(number) is before
    model.save(tmp_path / "model.keras")
    assert np.isfinite(model.predict(np.ones((1, 2)), verbose=0)).all()


def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.interrupted
        signal.raise_signal(signal.SIGINT)
