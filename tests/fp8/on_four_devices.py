"""Tests that need JAX with four virtual CPUs, so a process of their own; test_replicas.py starts it."""

import sys
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
assert len(jax.devices()) == 4, "start with XLA_FLAGS=--xla_force_host_platform_device_count=4"
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))

import trajectory  # noqa: E402
from network import RATE, RECIPES, assert_same, build, gradients, kernels_of, numbers  # noqa: E402

import keras_mp  # noqa: E402


@pytest.mark.parametrize("recipe", RECIPES)
def test_four_devices_share_scales(recipe):
    x, t, kernels = numbers(2)
    x[:4] /= 4  # the largest magnitude is not on every device
    model = build(kernels, recipe)
    model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(x, t, batch_size=8, shuffle=False, verbose=0)
    for part in (slice(0, 8), slice(8, 16)):
        kernels = [
            k - np.float32(RATE) * g for k, g in zip(kernels, gradients(x[part], t[part], kernels, recipe), strict=True)
        ]
    assert len(model.get_layer("shared").kernel.value.addressable_shards) == 4
    assert_same(kernels_of(model), kernels)


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "current"])
def test_products_and_gradients_within_shard_map_as_jax_checks_it(scaling):
    """Each of four devices has rows of the inputs, and computes as it would alone; the kernel is whole."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    generator = np.random.default_rng()
    x, kernel = (generator.normal(size=shape).astype("float32") for shape in ((128, 64), (64, 32)))

    def product(x, kernel):
        return keras_mp.fp8.matmul(x, kernel, scaling)

    def gradient(x, kernel):
        return jax.grad(lambda x: product(x, kernel).sum())(x)

    for function in (product, gradient):
        split = jax.shard_map(function, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
        alone = np.concatenate([jax.jit(function)(part, kernel) for part in np.split(x, 4)])
        np.testing.assert_allclose(jax.jit(split)(x, kernel), alone, rtol=1e-5, atol=1e-5)


def test_delayed_scaling_on_four_devices_is_that_of_the_whole_batch():
    recipes = trajectory.only("int8_delayed")
    model = trajectory.build(recipes, 3)
    trajectory.run(model, trajectory.references_of(recipes, 3), trajectory.steps(24))
    shards = model.get_layer("int8_delayed").amax_history.slots.value.addressable_shards
    assert len(shards) == 4
    for shard in shards[1:]:
        np.testing.assert_array_equal(shard.data, shards[0].data)
