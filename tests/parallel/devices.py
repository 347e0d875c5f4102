"""Imported by files that start in a process of their own: two devices on TensorFlow; on JAX XLA_FLAGS says how many."""

import keras
import pytest

TENSORFLOW = keras.backend.backend() == "tensorflow"
only_jax = pytest.mark.skipif(TENSORFLOW, reason="TensorFlow has data parallelism only")
only_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow has it")
if TENSORFLOW:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
else:
    import jax

    assert len(jax.devices()) >= 8, "start with XLA_FLAGS=--xla_force_host_platform_device_count=8"
