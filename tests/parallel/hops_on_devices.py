"""Gradients summed in hops over 16 devices, in a process of their own; test_hops.py starts it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import keras_mp
from keras_mp.parallel import distribution
from keras_mp.parallel._jax_part import put_together, scattered
from keras_mp.parallel.hops import HOPS, groups_of

DEVICES = 16
SHAPES = [(32, 3), (5, 48)]  # of which axis 0 or 1 is divided
assert len(jax.devices()) == DEVICES, f"start with XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"


def parts(summands, axis, hops, dtype="float32"):
    """What the devices get of a sum, put together along the axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    spec = [None] * (summands.ndim - 1)
    spec[axis] = "batch"

    def on_one(own):
        return scattered(own[0].astype(dtype), axis, groups_of(hops)).astype("float32")

    step = jax.shard_map(
        on_one, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec(*spec), check_vma=False
    )
    return np.asarray(jax.jit(step)(jnp.asarray(summands)))


@pytest.mark.parametrize("hops, axis", [((), 0), ((4, 4), 1), ((2, 8), 0), ((2, 2, 4), 1)])
def test_each_device_has_its_part_of_the_sum(axis, hops):
    shape = SHAPES[axis]
    random = np.random.default_rng()
    whole = random.integers(-1000, 1000, (DEVICES, *shape)).astype("float32")  # whose sums are exact
    np.testing.assert_array_equal(parts(whole, axis, hops), whole.sum(0))
    summands = random.normal(size=(DEVICES, *shape)).astype("float32")
    exact = summands.astype("float64").sum(0)
    bound = np.abs(summands).astype("float64").sum(0)
    # Of 16 summands at most 15 sums are rounded (Higham, "Accuracy and Stability of Numerical Algorithms", 4.2).
    assert (np.abs(parts(summands, axis, hops) - exact) <= 15 * 2.0**-24 * bound).all()
    assert (np.abs(parts(summands, axis, hops, "bfloat16") - exact) <= 16 * 2.0**-8 * bound).all()


@pytest.mark.parametrize("hops, axis", [((4, 4), 0), ((2, 2, 4), 1)])
def test_the_whole_is_put_together_from_the_parts(axis, hops):
    whole = np.random.default_rng().normal(size=SHAPES[axis]).astype("float32")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    spec = PartitionSpec(*[None] * axis, "batch")

    def on_one(part):
        return put_together(part, axis, groups_of(hops))[None]

    step = jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("batch"), check_vma=False)
    for found in np.asarray(jax.jit(step)(whole)):
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_arrives(value):
    summands = np.zeros((DEVICES, 32), "float32")
    summands[5, 7] = value
    found = parts(summands, 0, (4, 4))
    assert not np.isfinite(found[7]) and np.isfinite(np.delete(found, 7)).all()


@pytest.fixture
def in_two_hops(monkeypatch):
    """The devices of this machine are a slice of 16 v5e, in the order that hosts of 2 x 2 chips give them."""
    monkeypatch.setitem(HOPS, "v5e:4x4", (4, 4))
    hosts = [(x, y) for y in (0, 2) for x in (0, 2)]
    places = [(x + i, y + j, 0) for x, y in hosts for j in (0, 1) for i in (0, 1)]
    monkeypatch.setattr(distribution.engine, "tpu_coordinates", lambda names: ("TPU v5 lite", places))


def trained(policy, steps, *, distributed=True, overflow=None, scale=2.0**10, **options):
    """A small model after some steps; in step `overflow` one row is too large for float16."""
    random = np.random.default_rng(7)
    x, y = (random.normal(size=(steps * 32, 16)).astype("float32") for _ in range(2))
    if overflow is not None:
        x[32 * overflow + 9] = 1e30
    with (
        keras_mp.parallel.distribute("fully_sharded", DEVICES, **options)
        if distributed
        else contextlib.nullcontext() as plan
    ):
        keras.utils.set_random_seed(4)
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(16)])
        adam = keras.optimizers.AdamW(1e-2, global_clipnorm=1.0)
        kind = keras_mp.LossScale(initial_scale=scale) if policy == "mixed_float16" else keras_mp.LossScale.none()
        model.compile(keras_mp.LossScaleOptimizer(adam, kind), "mse")
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return plan, model, weights


on_one_device = functools.cache(functools.partial(trained, distributed=False))


def test_200_steps_in_hops_are_those_of_one_device_and_devices_are_in_the_order_of_their_coordinates(in_two_hops):
    plan, model, many = trained("float32", 200)
    one = on_one_device("float32", 200)[2]
    assert np.linalg.norm(many - one) < 1e-4 * np.linalg.norm(one)
    assert plan.hops == ((4, 4), (4, 4))
    # Of the first host, whose devices come first here, the second row of chips is the second row of the slice.
    assert plan.devices[:6] == ("cpu:0", "cpu:1", "cpu:4", "cpu:5", "cpu:2", "cpu:3")
    assert all(len(v.value.addressable_shards) == DEVICES for v in model.variables)


@pytest.mark.rare
def test_200_steps_of_fewer_bits_in_hops_stay_near_one_device(in_two_hops):
    start, one = (on_one_device("mixed_bfloat16", steps)[2] for steps in (1, 200))
    many = trained("mixed_bfloat16", 200, reduce_dtype="bfloat16", gather_dtype="float8")[2]
    distance, moved = (np.sqrt(np.mean((one - other) ** 2)) for other in (many, start))
    print(f"{distance:.2e} from one device; training moves the weights by {moved:.2e}")
    assert distance < moved / 4
