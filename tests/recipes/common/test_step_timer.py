import time

import pytest

from recipes.common.step_timer import StepTimer


class Slow:
    """A loss that is known only after some seconds, as on a device that runs behind."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __float__(self):
        time.sleep(self.seconds)
        return 1.0


def timed(*seconds):
    timer = StepTimer()
    for step, duration in enumerate(seconds):
        timer.on_train_batch_begin(step)
        timer.on_train_batch_end(step, {"loss": Slow(duration)})
    return timer


def test_the_first_step_is_the_compilation_and_the_rest_give_the_median():
    timer = timed(0.2, 0.02, 0.02, 0.1)
    assert timer.compile_seconds == pytest.approx(0.2, abs=0.05)
    assert 0.02 <= timer.step_seconds < 0.09


def test_one_step_has_no_step_time():
    assert timed(0.0).step_seconds is None
