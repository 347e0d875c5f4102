"""`ShuffledBatches` in `fit`, with nobody who says which epoch it is."""

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.jax


class Read(keras_mp.training.ShuffledBatches):
    """Notes what was read of which epoch."""

    def rows(self, epoch, step, first, last):
        inputs, targets = super().rows(epoch, step, first, last)
        self.seen.setdefault(epoch, {})[step] = inputs.ravel().astype(int).tolist()
        return inputs, targets


def fitted(epochs, **options):
    x = np.arange(10, dtype="float32")[:, None]
    batches = Read(x, x, batch_size=4, seed=7)
    batches.seen = {}
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(batches, epochs=epochs, shuffle=False, verbose=0, **options)
    return batches, model


def test_each_pass_has_an_order_of_its_own_and_none_is_left_out():
    batches, model = fitted(6)
    last = max(batches.seen)
    assert last in (5, 6) and set(range(1, last)) <= set(batches.seen)  # a first batch may be read before the training
    for epoch in range(1, last):
        order = np.random.default_rng((7, epoch)).permutation(10)
        assert batches.seen[epoch] == {step: order[4 * step : 4 * step + 4].tolist() for step in (0, 1)}
    assert {row for steps in batches.seen.values() for rows in steps.values() for row in rows} == set(range(10))
    model.fit(batches, epochs=2, shuffle=False, verbose=0)
    assert max(batches.seen) in (last + 1, last + 2)  # it goes on, and does not begin again


def test_a_callback_that_says_the_epoch_is_obeyed():
    epochs = []

    class Says(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            batches.start_at(3 * epoch)
            batches.seen.clear()

        def on_epoch_end(self, epoch, logs=None):
            epochs.append(sorted(batches.seen))

    x = np.arange(10, dtype="float32")[:, None]
    batches = Read(x, x, batch_size=4, seed=7)
    batches.seen = {}
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(batches, epochs=3, shuffle=False, verbose=0, callbacks=[Says()])
    assert all(3 * epoch in read for epoch, read in enumerate(epochs))
