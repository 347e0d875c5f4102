import keras
import numpy as np
import pytest

from recipes.common.batches import ShuffledBatches

EXAMPLES = np.arange(23, dtype="float32")[:, None]


def order(seed, epoch):
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=seed)
    batches.set_epoch(epoch)
    return [int(label) for step in range(len(batches)) for label in batches[step][1]]


def test_order_is_a_function_of_seed_and_epoch():
    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_an_epoch_is_full_batches_of_distinct_examples():
    assert len(order(0, 0)) == len(set(order(0, 0))) == 20


def test_images_stay_with_their_labels():
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=0)
    for images, labels in (batches[step] for step in range(len(batches))):
        np.testing.assert_array_equal(images[:, 0], labels)


def test_fit_sees_the_order_of_each_epoch():
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=3)
    seen = []

    class Record(keras.metrics.Mean):
        """The labels of a step as one number in base 23, out of the compiled step through its logs."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            digits = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "float32")
            self.reset_state()
            super().update_state(keras.ops.sum(digits * np.array([23.0**power for power in range(5)], "float32")))

    def record(batch, logs):
        number = round(float(logs["record"]))
        seen.extend(number // 23**power % 23 for power in range(5))

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Record(name="record")])
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: batches.set_epoch(epoch)),
        keras.callbacks.LambdaCallback(on_train_batch_end=record),
    ]
    model.fit(batches, initial_epoch=1, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert seen == order(3, 1) + order(3, 2)


def test_a_batch_larger_than_the_data_is_an_error():
    with pytest.raises(ValueError, match="batch_size is 64, but there are only 23"):
        ShuffledBatches(EXAMPLES, np.arange(23), batch_size=64, seed=0)
