"""The planted text, learnt by LoRA on an int4 Gemma; as a program, a training that kills itself.

python tests/training/adapted_training.py POLICY FOLDER EPOCH STEP
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it has the tests' helpers too

import adapted_models
import keras

import keras_mp

STEPS, EPOCHS = 4, 3


class Planted(keras_mp.Batches):
    """The same text in each step."""

    def __init__(self):
        super().__init__(examples=2 * STEPS, batch_size=2, seed=0)

    def batch(self, epoch, step):
        return adapted_models.tokens(rows=2)


def build(policy, learning_rate=0.03, state_dtype=None, **sizes):
    """LoRA on an int4 base, prepared for training."""
    model = adapted_models.gemma(policy, **sizes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(model, keras.optimizers.Adam(learning_rate), loss, state_dtype=state_dtype)


def train(policy, folder, *actions, **settings):
    """Trains over checkpoints; returns the model."""
    model, batches = build(policy, **settings), Planted()
    checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=2)
    # KerasHub's own fit, which preprocesses text, takes no PyDataset.
    keras.Model.fit(model, batches, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[*actions, checkpoint])
    return model


class KillAt(keras.callbacks.Callback):
    def __init__(self, epoch, step):
        super().__init__()
        self.place = (epoch, step)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    policy, folder, epoch, step = sys.argv[1:]
    train(policy, Path(folder), KillAt(int(epoch), int(step)))
    sys.exit("it should have been killed")
