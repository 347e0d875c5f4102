"""Tests on several replicas, which need a process of their own; test_optimizer_replicas.py starts it."""

import keras
import numpy as np
import pytest
import trajectory
from network import RATE, RECIPES, assert_same, build, gradients, numbers
from replicas import REPLICAS, scope, values_on_each

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
MODE = {"jit_compile": not TENSORFLOW}


@pytest.mark.parametrize("recipe", ["current"] if TENSORFLOW else RECIPES)
def test_scales_and_the_gradients_that_are_applied(recipe):
    """A replica of TensorFlow scales its own part, and the mean is applied; devices of JAX share their scales."""
    x, t, kernels = numbers(2)
    x[:4] /= 4  # the parts of a batch need different scales
    with scope():
        model = build(kernels, recipe)
        sgd = keras.optimizers.SGD(RATE)
        model.compile(keras_mp.LossScaleOptimizer(sgd, keras_mp.LossScale.none()), "mse", **MODE)
    model.fit(x, t, batch_size=8, shuffle=False, verbose=0)
    for start in (0, 8):
        batch = (np.split(array[start : start + 8], REPLICAS if TENSORFLOW else 1) for array in (x, t))
        parts = [gradients(*part, kernels, recipe) for part in zip(*batch, strict=True)]
        means = [sum(group) / len(parts) for group in zip(*parts, strict=True)]
        kernels = [kernel - np.float32(RATE) * mean for kernel, mean in zip(kernels, means, strict=True)]
    for found in zip(*(values_on_each(model.get_layer(name).kernel) for name in ("shared", "last")), strict=True):
        assert_same(found, kernels)


@pytest.mark.skipif(TENSORFLOW, reason="JAX has shard_map")
@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "current"])
def test_products_and_gradients_within_shard_map_as_jax_checks_it(scaling):
    """Each of four devices has rows of the inputs, and computes as it would alone; the kernel is whole."""
    import jax

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


class Planted(keras.callbacks.Callback):
    """Sets the kernels before each step, and compares the histories after it."""

    def __init__(self, plan, references):
        super().__init__()
        self.plan, self.references = plan, references

    def on_train_batch_begin(self, batch, logs=None):
        for name in self.references:
            keras.Variable.assign(self.model.get_layer(name).kernel, self.plan[batch][3])  # as an update has it

    def on_train_batch_end(self, batch, logs=None):
        trajectory.follow(self.references, *self.plan[batch])
        check_histories(self.model, self.references)
        trajectory.assert_same_state(self.model, self.references)


def check_histories(model, references):
    for name in references:
        first, *others = values_on_each(model.get_layer(name).amax_history.slots)
        assert len(others) == REPLICAS - 1
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_delayed_scaling_is_on_every_replica_that_of_the_whole_batch():
    plan, recipes = trajectory.steps(12), trajectory.only("int8_delayed")
    references = trajectory.references_of(recipes, 3)
    with scope():
        model = trajectory.build(recipes, 3, **MODE)
    if TENSORFLOW:  # whose train_on_batch gives each replica the whole batch
        a, b, c = (np.concatenate([step[i] for step in plan]) for i in range(3))
        planted = [Planted(plan, references)]
        model.fit([a, b], c, batch_size=trajectory.ROWS, verbose=0, shuffle=False, callbacks=planted)
    else:
        trajectory.run(model, references, plan)
        check_histories(model, references)
