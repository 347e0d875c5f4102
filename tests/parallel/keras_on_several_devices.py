"""What Keras does on two devices where the kit replaces it; test_distribute.py starts it in a process of its own.

A test that fails here says that its patch has become needless, or that the kit's replacement no longer mends.
"""

import keras
import numpy as np
import pytest
from devices import TENSORFLOW, only_jax, only_tensorflow

import keras_mp
from keras_mp.backend.common.keras_patches import patched

pytestmark = pytest.mark.slow
if TENSORFLOW:
    import tensorflow as tf
else:
    import jax
    from jax.sharding import PartitionSpec


def own_scope():
    """Two devices by Keras alone."""
    if TENSORFLOW:
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
    return keras.distribution.DataParallel(
        devices=keras.distribution.list_devices()[:2], auto_shard_dataset=False
    ).scope()


def fit(rows, batch_size, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=not TENSORFLOW, **options)
    model.fit(np.ones((rows, 2), "float32"), np.ones((rows, 1), "float32"), batch_size, verbose=0)
    return model


def drawn(strategy, generator):
    values = strategy.run(lambda: keras.random.uniform((4,), seed=generator)).values
    return [value.numpy().tolist() for value in values]


@only_tensorflow
def test_every_replica_of_tensorflow_draws_the_same_numbers():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        one, other = drawn(strategy, keras.random.SeedGenerator(1))
    assert one == other
    with keras_mp.parallel.distribute("data", 2):
        one, other = drawn(tf.distribute.get_strategy(), keras.random.SeedGenerator(1))
    assert one != other


@only_jax
def test_every_device_of_jax_draws_the_same_numbers():
    from keras_mp.parallel._jax import _own_draw

    generator = keras.random.SeedGenerator(1)
    rows = PartitionSpec("batch")

    def draw(_):
        with keras.StatelessScope():
            return keras.random.uniform((4,), seed=generator)

    def on_both():
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("batch",))
        numbers = jax.shard_map(draw, mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=False)(np.zeros(2))
        return np.asarray(numbers).reshape(2, 4).tolist()

    one, other = on_both()
    assert one == other
    with patched({"keras.random.SeedGenerator.next": _own_draw}):
        jax.clear_caches()
        one, other = on_both()
    assert one != other


@only_tensorflow
def test_several_steps_an_execution_fail_on_replicas():
    with own_scope(), pytest.raises(Exception, match="Graph execution error"):
        fit(8, 2, steps_per_execution=2)
    with keras_mp.parallel.distribute("data", 2):
        fit(8, 2, steps_per_execution=2)


@only_jax
def test_a_last_batch_that_devices_cannot_divide_fails():
    with own_scope(), pytest.raises(ValueError, match="divi"):
        fit(5, 2)
    with keras_mp.parallel.distribute("data", 2):
        fit(5, 2)


@only_jax
def test_the_gradients_of_a_step_are_summed_by_the_compiler():
    def collectives(scope):
        with scope:
            model = fit(4, 2)
            x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
            groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
            state = tuple([variable.value for variable in group] for group in (*groups, model.metrics_variables))
            return jax.jit(model.train_step).lower(state, (x, y)).as_text().count("stablehlo.all_reduce")

    assert collectives(own_scope()) == 0
    assert collectives(keras_mp.parallel.distribute("data", 2)) > 0
