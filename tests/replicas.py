"""Several replicas on one CPU: two under TensorFlow's MirroredStrategy, or four virtual devices of JAX.

They must be configured before anything else has used the devices, so this is for a process of its own.
"""

import contextlib

import keras
import numpy as np

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    REPLICAS = 2
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    _strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(REPLICAS)])
    scope = _strategy.scope

    def run(function, rows):
        """Calls a function on each replica, with a row for each."""
        each = _strategy.experimental_distribute_values_from_function(
            lambda context: rows[context.replica_id_in_sync_group][None]
        )
        return _strategy.run(function, args=(each,))

    def values_on_each(variable):
        """The value of a variable on each replica, in NumPy."""
        return [value.numpy() for value in _strategy.experimental_local_results(variable.value)]
else:
    import jax

    REPLICAS = 4
    assert len(jax.devices()) == REPLICAS, "start with XLA_FLAGS=--xla_force_host_platform_device_count=4"
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    scope = contextlib.nullcontext
    run = None

    def values_on_each(variable):
        """The value of a variable on each device, in NumPy."""
        return [np.asarray(shard.data) for shard in variable.value.addressable_shards]
