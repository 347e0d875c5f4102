"""Tests that need TensorFlow with two logical CPUs, so a process of their own; test_replicas.py starts it."""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

import trajectory  # noqa: E402
from network import RATE, assert_same, build, gradients, numbers  # noqa: E402

import keras_mp  # noqa: E402


def test_each_replica_scales_its_own_part_and_the_mean_is_applied():
    x, t, kernels = numbers(2)
    x[:4] /= 4  # the two halves of a batch need different scales
    with strategy.scope():
        model = build(kernels)
        sgd = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
        model.compile(keras_mp.LossScaleOptimizer(sgd, keras_mp.LossScale.none()), "mse", jit_compile=False)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, t)).batch(8).with_options(options)
    model.fit(data, verbose=0, shuffle=False)
    parts = [gradients(x[start : start + 4], t[start : start + 4], kernels) for start in range(0, 16, 4)]
    expected = [k - np.float32(RATE) * sum(g) / 4 for k, g in zip(kernels, zip(*parts, strict=True), strict=True)]
    for replica in range(2):
        found = [
            strategy.experimental_local_results(model.get_layer(name).kernel.value)[replica].numpy()
            for name in ("shared", "last")
        ]
        assert_same(found, expected)


class Planted(keras.callbacks.Callback):
    """Sets the kernels before each step, and compares the histories after it, on both replicas."""

    def __init__(self, plan, references):
        super().__init__()
        self.plan, self.references = plan, references

    def on_train_batch_begin(self, batch, logs=None):
        for name in self.references:
            keras.Variable.assign(self.model.get_layer(name).kernel, self.plan[batch][3])  # as an update has it

    def on_train_batch_end(self, batch, logs=None):
        trajectory.follow(self.references, *self.plan[batch])
        for name in self.references:
            slots = self.model.get_layer(name).amax_history.slots.value
            first, second = strategy.experimental_local_results(slots)
            np.testing.assert_array_equal(first, second)
        trajectory.assert_same_state(self.model, self.references)


def test_delayed_scaling_on_both_replicas_is_that_of_the_whole_batch():
    plan, recipes = trajectory.steps(24), trajectory.only("int8_delayed")
    with strategy.scope():
        model = trajectory.build(recipes, 3, jit_compile=False)
    a, b, c = (np.concatenate([step[i] for step in plan]) for i in range(3))
    data = tf.data.Dataset.from_tensor_slices(((a, b), c)).batch(trajectory.ROWS)
    planted = Planted(plan, trajectory.references_of(recipes, 3))
    model.fit(data, verbose=0, shuffle=False, callbacks=[planted])
