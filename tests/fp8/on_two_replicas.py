"""Tests that need TensorFlow with two logical CPUs, so a process of their own; test_replicas.py starts it."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

import trajectory  # noqa: E402
from marks import few  # noqa: E402
from network import RATE, RECIPES, assert_same, build, gradients, numbers  # noqa: E402

import keras_mp  # noqa: E402

SCALES = ["delayed", "static"]


@pytest.mark.parametrize("recipe", few(RECIPES, "mxfp8"))
@pytest.mark.parametrize("accumulate", [pytest.param(None, marks=pytest.mark.ci), 2])
def test_each_replica_scales_its_own_part_and_the_mean_is_applied(accumulate, recipe):
    x, t, kernels = numbers(2)
    x[:4] /= 4  # the two halves of a batch need different scales
    with strategy.scope():
        model = build(kernels, recipe)
        optimizer = keras_mp.LossScaleOptimizer(
            keras.optimizers.SGD(RATE, gradient_accumulation_steps=accumulate), keras_mp.NoLossScale()
        )
        model.compile(optimizer, "mse", jit_compile=False)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, t)).batch(8).with_options(options)
    model.fit(data, verbose=0, shuffle=False)
    expected, means = kernels, []
    for start in (0, 8):
        halves = [gradients(x[s : s + 4], t[s : s + 4], expected, recipe) for s in (start, start + 4)]
        means.append([(a + b) / 2 for a, b in zip(*halves, strict=True)])
        if accumulate is None:
            expected = [k - np.float32(RATE) * g for k, g in zip(expected, means[-1], strict=True)]
    if accumulate:
        expected = [k - np.float32(RATE) * (a + b) / 2 for k, a, b in zip(kernels, *means, strict=True)]
    for replica in range(2):
        kernels = [
            strategy.experimental_local_results(model.get_layer(name).kernel.value)[replica].numpy()
            for name in ("shared", "last")
        ]
        assert_same(kernels, expected)


class Planted(keras.callbacks.Callback):
    """Sets the kernel before each step, and compares the history after it, on both replicas."""

    def __init__(self, plan, reference):
        super().__init__()
        self.plan, self.reference = plan, reference

    def on_train_batch_begin(self, batch, logs=None):
        self.model.get_layer("shared").kernel.assign(self.plan[batch][3])

    def on_train_batch_end(self, batch, logs=None):
        self.reference.step(*self.plan[batch], checks=True)
        trajectory.assert_same_state(self.model, self.reference)
        slots = self.model.get_layer("shared").amax_history.slots.value
        first, second = strategy.experimental_local_results(slots)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["margin", *(pytest.param(f"INT8 {s}", marks=pytest.mark.ci) for s in SCALES)])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.ci), 3])
def test_delayed_scaling_on_both_replicas_is_that_of_the_whole_batch(name, accumulate):
    plan = trajectory.steps(50)
    recipe = trajectory.RECIPES[name]
    with strategy.scope():
        model = trajectory.build(recipe, accumulate, jit_compile=False)
    a, b, c = (np.concatenate([step[i] for step in plan]) for i in range(3))
    data = tf.data.Dataset.from_tensor_slices(((a, b), c)).batch(trajectory.ROWS)
    planted = Planted(plan, trajectory.reference_of(recipe, accumulate))
    model.fit(data, verbose=0, shuffle=False, callbacks=[planted])
