import numpy as np
import pytest

from keras_mp.training.batches import ShuffledBatches

EXAMPLES = np.arange(23, dtype="float32")[:, None]


def order(seed, epoch):
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=seed)
    batches.start_at(epoch)
    return [int(label) for step in range(len(batches)) for label in batches[step][1]]


def test_order_is_a_function_of_seed_and_epoch():
    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_an_epoch_is_full_batches_of_distinct_examples_with_their_targets():
    assert len(order(0, 0)) == len(set(order(0, 0))) == 20
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=0)
    for inputs, targets in (batches[step] for step in range(len(batches))):
        np.testing.assert_array_equal(inputs[:, 0], targets)


def test_an_epoch_can_begin_at_any_step():
    batches = ShuffledBatches(EXAMPLES, np.arange(23), batch_size=5, seed=0)
    batches.start_at(2, 3)
    assert len(batches) == 1 and batches.steps == 4
    np.testing.assert_array_equal(batches[0][1], batches.batch(2, 3)[1])
    batches.start_at(3)
    assert len(batches) == 4
    assert order(0, 3) == [int(label) for step in range(4) for label in batches[step][1]]


def test_a_bad_argument_is_named():
    for arguments, place, message in [
        ({}, (0, 4), "step must be below 4"),
        ({}, (-1, 0), "epoch=-1 must be a whole number"),
        ({"batch_size": 0}, None, "batch_size=0 must be a whole number, 1 or more"),
        ({"batch_size": 2.5}, None, "batch_size=2.5 must be a whole number, 1 or more"),
        ({"batch_size": 64}, None, "batch_size is 64, but there are only 23"),
        ({"seed": -1}, None, "seed=-1 must be a whole number, 0 or more"),
        ({"targets": np.arange(22)}, None, "inputs has 23 examples and targets 22"),
    ]:
        with pytest.raises(ValueError, match=message):
            given = {"inputs": EXAMPLES, "targets": np.arange(23), "batch_size": 5, "seed": 0, **arguments}
            batches = ShuffledBatches(**given)
            batches.start_at(*place or (0, 0))
