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
    assert set(batches.seen) == set(range(6))  # a batch that is read before, to build the model, is no pass
    for epoch in range(6):
        order = np.random.default_rng((7, epoch)).permutation(10)
        assert batches.seen[epoch] == {step: order[4 * step : 4 * step + 4].tolist() for step in (0, 1)}
    assert {row for steps in batches.seen.values() for rows in steps.values() for row in rows} == set(range(10))
    model.fit(batches, epochs=2, shuffle=False, verbose=0)
    assert max(batches.seen) == 7  # it goes on, and does not begin again


def test_a_checkpoint_among_the_callbacks_changes_no_order(tmp_path):
    """Weights after three epochs, with and without it; on JAX they were apart."""
    x = np.random.default_rng().normal(size=(32, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    start, ends = model.get_weights(), []
    for with_it in (False, True):
        model.set_weights(start)
        model.compile("sgd", "mse")
        batches = keras_mp.training.ShuffledBatches(x, x[:, :1], batch_size=8, seed=3)
        callbacks = [keras_mp.TrainingCheckpoint(tmp_path, batches)] if with_it else []
        model.fit(batches, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        ends.append(model.get_weights()[0])
    np.testing.assert_array_equal(*ends)
