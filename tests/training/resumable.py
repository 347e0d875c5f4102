"""A small training with everything that a resumed one can get wrong; as a program, one that kills itself.

python tests/training/resumable.py PRECISION FOLDER EPOCH STEP
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_mp
from keras_mp.precision.policy import set_global_policy

EPOCHS, STEPS, BATCH = 3, 7, 8
RECIPES = {
    "fp8": keras_mp.fp8.Scalings.named("delayed", history=4),
    "int8": keras_mp.fp8.Scalings.named("int8", history=4, kernel_gradient=True),
}


class Act(keras.callbacks.Callback):
    """Does something after a step, counted from 0."""

    def __init__(self, place, action):
        super().__init__()
        self.place, self.action = place, action

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            self.action(self)


class Crash(Exception):
    """What ends a training that crashes in the same process."""


def data():
    generator = np.random.default_rng(7)
    x = generator.normal(size=(STEPS * BATCH + 3, 8, 8, 1)).astype("float32")
    return keras_mp.training.ShuffledBatches(x, generator.integers(0, 4, len(x)), BATCH, seed=5)


def build(precision, initial_scale=2.0**22, seed=11, **settings):
    """Augmentation, dropout, moving statistics, moving averages; float16 accumulates over 3 steps and overflows.

    "small" is float32 with dropout alone, which compiles fast; "float8 states" has one slot more that is large,
    and "host states" has it in the host's memory; "int4" trains LoRA on frozen codes.
    """
    layers = keras.layers
    if precision in ("small", "float8 states", "host states", "int4"):
        keras.utils.set_random_seed(seed)
        small = [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dropout(0.3), layers.Dense(4)]
        optimizer = keras.optimizers.AdamW(0.01)
        if precision.endswith("states"):
            small[3:3] = [layers.Dense(64)]
            memory = "host" if precision == "host states" else "device"
            optimizer = keras_mp.LossScaleOptimizer(
                optimizer,
                keras_mp.LossScale.none(),
                state_dtype="float8",
                state_memory=memory,
                release_gradients=memory == "host",
            )
        model = keras.Sequential(small, name="small")
        if precision == "int4":
            model.layers[-1].quantize("int4")
            model.layers[-1].enable_lora(2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model
    with set_global_policy("mixed_bfloat16" if precision in RECIPES else precision):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.RandomTranslation(0.2, 0.2, dtype="float32"),
                layers.GaussianNoise(0.1),
                layers.Flatten(),
                layers.Dense(32, activation="relu", name="wide"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(16, name="narrow"),
                layers.Dense(4, name="logits"),
            ],
            name="named",  # INT8 gradients are rounded by the paths of layers
        )
        if precision in RECIPES:
            model = keras_mp.convert(model, RECIPES[precision], select=lambda path, layer: True)
        model = keras_mp.stabilize(model)
        optimizer = keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.01, EPOCHS * STEPS),
            global_clipnorm=1.0,
            use_ema=True,
            **({"gradient_accumulation_steps": 3 if precision == "mixed_float16" else None} | settings),
        )
        if precision == "mixed_float16":
            optimizer = keras_mp.LossScaleOptimizer(optimizer, initial_scale=initial_scale, growth_interval=4)
        if precision in (*RECIPES, "bfloat16"):
            # It rounds bfloat16 weights stochastically. Keras's own fails to average weights that gradients
            # overwrite, as FP8's amax histories are.
            optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none())
        if keras.backend.backend() == "jax":
            for layer in model.layers:
                layer.supports_jit = True  # Keras rules it out for augmentation because of TensorFlow's kernels
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], auto_scale_loss=False)
        if precision == "mixed_float16":
            keras_mp.loss_scaling.atomic_skip(model)
    return model


def train(precision, folder, *actions, every=2, model=None, epochs=EPOCHS, **options):
    """Trains, and returns the model and the logs of each epoch that was run."""
    model = model or build(precision)
    batches = data()
    history = keras.callbacks.History()
    checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=every, callbacks=[history], **options)
    model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[history, *actions, checkpoint])
    return model, history.history


def values(model):
    """All that a training changes, by name."""
    named = [(f"{index} {v.path}", v) for index, v in enumerate([*model.variables, *model.optimizer.variables])]
    return {name: np.asarray(keras.ops.convert_to_numpy(variable)) for name, variable in named}


def kill(callback):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    precision, folder, epoch, step = sys.argv[1:]
    train(precision, Path(folder), Act((int(epoch), int(step)), kill))
    sys.exit("it should have been killed")
