"""The lines of advice run on this machine, and what `inspect` says of the model that they leave."""

import keras
import numpy as np
from keras import layers

import keras_mp
from keras_mp.planner.fit.measures import Measures

ROWS, WIDTH = 2048, 32


class Residual(layers.Layer):
    """A block with a Dense layer and an activation."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.up, self.down = layers.Dense(4 * WIDTH, "gelu", name="up"), layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        return x + self.down(self.up(x))


def build():
    """A compiled model of two blocks."""
    x = inputs = keras.Input((WIDTH,))
    for index in range(2):
        x = Residual(name=f"block{index}")(x)
    model = keras.Model(inputs, layers.Dense(8, dtype="float32", name="head")(x))
    model.compile(keras.optimizers.AdamW(1e-2), "mse")
    return model


def data():
    rng = np.random.default_rng()
    return rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.normal(size=(ROWS, 8)).astype("float32")


def model_after(code, given, x, y):
    """Runs lines as a program does in which `build` and the data are there, or the model; returns its model."""
    program = {"keras_mp": keras_mp, "x": x, "y": y, **given}
    exec("\n".join(code), program)
    return program["model"]


def check(row_report, measures: Measures, place, model, x, y):
    """The lines made one update, and `inspect` of the model agrees with the row to the byte."""
    assert int(model.optimizer.iterations) == 1
    part = len(x) // measures.micro_batches
    several = {"strategy": measures.strategy} if measures.strategy else {}
    batch = tuple(keras.KerasTensor((part, *array.shape[1:]), "float32") for array in (x, y))
    report = keras_mp.inspect(model, batch, place.name, **several)
    for name in ("parameters", "optimizer", "other", "temporary", "peak"):
        assert getattr(report.memory, name) == getattr(row_report.memory, name), name
    assert (report.flops, report.shares) == (row_report.flops, row_report.shares)
