"""The devices of this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from keras_mp.backend.common.device import (
    DeviceInfo,
    TracedChip,
    absent_chip,
    answered,
    best_first,
    chip_in_scope,
    chip_of,
)
from keras_mp.backend.common.keras_patches import patched
from keras_mp.system.host import peak_process_bytes


def local_devices() -> list[DeviceInfo]:
    """Lists the devices that are visible, the best kind first."""
    try:
        return best_first(_describe(device) for device in tf.config.get_visible_devices())
    except (RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(f"TensorFlow {tf.__version__} could not list its devices: {error}") from error


def traced_chip() -> TracedChip:
    """Returns the chip that a step is traced for."""
    return chip_in_scope() or chip_of(local_devices()[0])


@contextmanager
def traced_for(chip: TracedChip) -> Iterator[None]:
    """Scope in which Keras and KerasHub find a chip."""
    with absent_chip(chip), patched(_ANSWERS):
        yield


_ANSWERS = {
    "keras.src.backend.tensorflow.nn._cpu_only": answered(lambda _, chip: chip.platform == "cpu"),
    # XLA, which compiles the step, has no such operation.
    "keras.src.backend.tensorflow.rnn._is_gpu_available": answered(lambda *_: False),
}


def _describe(device: tf.config.PhysicalDevice) -> DeviceInfo:
    if device.device_type == "CPU":
        return DeviceInfo("cpu", "", "")
    if device.device_type == "TPU":
        # TensorFlow does not say which generation a TPU is of.
        return DeviceInfo("tpu", "TPU", "")
    details = tf.config.experimental.get_device_details(device)
    capability = details.get("compute_capability")
    architecture = ".".join(map(str, capability)) if capability else ""
    return DeviceInfo("gpu", details.get("device_name", device.name), architecture)


def peak_memory_bytes() -> int | None:
    """Measures the most bytes in use, on the fullest accelerator.

    Without one, of this process; None where the runtime does not tell (TPUs, Metal).
    """
    accelerators = [device for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if not accelerators:
        return peak_process_bytes()
    try:
        # TensorFlow 2.21 answers 0 for a device that keeps no count.
        return max(tf.config.experimental.get_memory_info(device.name)["peak"] for device in accelerators) or None
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None


def bfloat16_options() -> Mapping[str, Any]:
    """Returns none."""
    # On a CPU TensorFlow's kernels multiply bfloat16 matrices, and no program of XLA does.
    return {}


@contextmanager
def full_float32() -> Iterator[None]:
    """Scope in which products of float32 are float32."""
    # By default a GPU rounds their operands to TF32.
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
