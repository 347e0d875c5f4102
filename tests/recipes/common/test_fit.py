import keras
import numpy as np

from keras_mp.training.batches import ShuffledBatches
from recipes.common.config import TrainingConfig
from recipes.common.fit import fit


def data(examples):
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


class Batches(ShuffledBatches):
    def start_at(self, epoch, step=0):
        super().start_at(epoch, step)
        self.epoch = epoch


def linear():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_each_epoch_is_shuffled_timed_tested_and_kept(tmp_path, capsys):
    batches = Batches(*data(20), batch_size=4, seed=0)
    training = fit(linear(), batches, TrainingConfig(epochs=3), tmp_path, data(8), 8)
    assert batches.epoch == 2
    assert len(training.timer.seconds) == 14  # the first step compiles
    assert [row["epoch"] for row in training.history.rows] == [1, 2, 3]
    assert training.history.rows[-1]["test_loss"] < training.history.rows[0]["test_loss"]
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 4
    assert "epoch 3/3" in capsys.readouterr().out
    assert not training.interrupted
