"""Tests that need TensorFlow with two logical CPUs, so a process of their own; test_replicas.py starts it."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

from network import RATE, assert_same, build, gradients, numbers  # noqa: E402

import keras_mp  # noqa: E402


@pytest.mark.parametrize("accumulate", [None, 2])
def test_each_replica_scales_its_own_part_and_the_mean_is_applied(accumulate):
    x, t, kernels = numbers(2)
    x[:4] /= 4  # the two halves of a batch need different scales
    with strategy.scope():
        model = build(kernels)
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
        halves = [gradients(x[s : s + 4], t[s : s + 4], expected) for s in (start, start + 4)]
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
