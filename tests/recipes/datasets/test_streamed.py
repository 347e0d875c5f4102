"""The place in a stream: any order of questions gets the same answers."""

import threading

import numpy as np

from recipes.datasets.streamed import StreamedBatches, keys


def stream(opened=None):
    """Ten batches an epoch, each its own place; `opened` notes where the stream is opened."""

    def open_at(epoch, step):
        if opened is not None:
            opened.append((epoch, step))
        return iter([(epoch, each) for each in range(step, 10)])

    return StreamedBatches(examples=42, batch_size=4, seed=0, opened=open_at)


def test_steps_that_follow_each_other_read_one_stream():
    opened = []
    batches = stream(opened)
    assert [batches.batch(1, step) for step in range(10)] == [(1, step) for step in range(10)]
    assert opened == [(1, 0)]


def test_any_other_place_is_opened_anew():
    opened = []
    batches = stream(opened)
    places = [(0, 0), (0, 1), (0, 0), (0, 1), (3, 7), (3, 8), (3, 2), (4, 0)]
    assert [batches.batch(*place) for place in places] == places
    assert opened == [(0, 0), (0, 0), (3, 7), (3, 2), (4, 0)]


def test_readers_in_other_threads_get_what_they_ask_for():
    batches, seen = stream(), []

    def read(epoch):
        seen.extend(batches.batch(epoch, step) == (epoch, step) for step in range(10))

    threads = [threading.Thread(target=read, args=(epoch,)) for epoch in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80 and all(seen)


def test_keys_of_neighbours_have_nothing_in_common():
    drawn = np.concatenate([keys(seed, epoch) for seed in range(20) for epoch in range(20)])
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < 2**31
    assert len(set(drawn.tolist())) == len(drawn)
    np.testing.assert_array_equal(keys(3, 4), keys(3, 4))
