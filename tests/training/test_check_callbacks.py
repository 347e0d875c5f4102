"""Which callbacks the loop for several processes takes."""

import warnings

import keras
import pytest

from keras_mp.training.fit_loop import check_callbacks


def callback_with(**attributes):
    return type("OwnCallback", (keras.callbacks.Callback,), attributes)()


def test_a_callback_of_ones_own_must_say_that_it_supports_several_processes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_callbacks([keras.callbacks.History(), callback_with(supports_multiprocess=True)])
    with pytest.raises(ValueError, match="a OwnCallback, which is not supported when several.*supports_multiprocess"):
        check_callbacks([callback_with()])
