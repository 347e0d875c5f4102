"""Lean attention whose arrays are split over eight devices, in a process of its own; test_dropped.py starts it."""

import jax
import numpy as np
import pytest
from drawn import kept_in_numpy, seed_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_mp.lean.blockwise_attention import attention, kept, keys_of

BATCH, ROWS, HEADS, FEATURES = 8, 48, 8, 4
SPLITS = [PartitionSpec("x"), PartitionSpec("x", None, "y"), PartitionSpec(None, "y", "x")]


def mesh():
    devices = jax.devices()
    assert len(devices) == 8
    return Mesh(np.array(devices).reshape(4, 2), ("x", "y"))


@pytest.mark.parametrize("split", SPLITS)
def test_values_and_gradients_are_those_of_one_device(split):
    generator = np.random.default_rng()
    seed = seed_state(generator.integers(2**31, size=2))
    arrays = [generator.normal(size=(BATCH, ROWS, HEADS, FEATURES)).astype("float32") for _ in range(4)]

    @jax.jit
    def both(arrays, seed):
        *arguments, upstream = arrays

        def total(*arguments):
            return (attention(*arguments, causal=True, block=20, dropout=0.3, seed=seed) * upstream).sum()

        return jax.value_and_grad(total, (0, 1, 2))(*arguments)

    sharding = NamedSharding(mesh(), split)
    one, split_over_eight = both(arrays, seed), both([jax.device_put(x, sharding) for x in arrays], seed)
    assert len(split_over_eight[1][0].sharding.device_set) == 8
    # Another mask would move each by the size of the values.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), one, split_over_eight)


def test_the_mask_of_each_part_is_that_of_the_whole():
    seed, shape = np.random.default_rng().integers(2**31, size=2), (8, 4, 16, 24)
    sharding = NamedSharding(mesh(), PartitionSpec("x", None, None, "y"))
    draw = jax.jit(lambda seed: kept(*keys_of(seed, shape[:-1]), shape[-1], 0.3), out_shardings=sharding)
    np.testing.assert_array_equal(draw(seed_state(seed)), kept_in_numpy(map(int, seed), shape, 0.3))
