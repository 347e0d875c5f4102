import json

import keras
import numpy as np

from keras_mp.training.checkpoint import changed, from_json, snapshot, to_json


def through_a_file(state):
    arrays = {}
    text = json.dumps(to_json(state, arrays, "callbacks"))
    return from_json(json.loads(text), arrays)


def test_only_what_training_changed_is_kept():
    early = keras.callbacks.EarlyStopping("loss", patience=7, restore_best_weights=True)
    early.on_train_begin()
    before = snapshot(early)
    early.min_delta = -early.min_delta  # as it does itself at the end of the first epoch
    early.wait, early.best, early.best_weights = 3, np.float32(0.25), [np.arange(6.0).reshape(2, 3), np.float64(np.nan)]
    state = changed(early, before)
    assert state.keys() == {"wait", "best", "best_weights"}
    other = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    vars(other).update(through_a_file(state))
    assert other.patience == 2 and other.wait == 3 and other.best == 0.25
    np.testing.assert_array_equal(other.best_weights[0], early.best_weights[0])
