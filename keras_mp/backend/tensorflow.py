"""What is TensorFlow's own: its devices, their memory, its version, its contraction of 16-bit operands."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Private, because the public tf.matmul takes an output dtype for integers alone.
from tensorflow.compiler.tf2xla.python import xla as tfxla
from tensorflow.compiler.xla import xla_data_pb2

from keras_mp.backend.device import DeviceInfo, best_first
from keras_mp.backend.host import cpu_name, peak_process_bytes


def local_devices() -> list[DeviceInfo]:
    """Lists the devices that TensorFlow may use in this process, the best kind first.

    Returns:
        One entry per device. Devices hidden with `tf.config.set_visible_devices` are left out.

    Raises:
        RuntimeError: If TensorFlow cannot list its devices.
    """
    try:
        return best_first(_describe(device) for device in tf.config.get_visible_devices())
    except (RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(f"TensorFlow {tf.__version__} could not list its devices: {error}") from error


def _describe(device: tf.config.PhysicalDevice) -> DeviceInfo:
    if device.device_type == "CPU":
        return DeviceInfo("cpu", cpu_name(), "")
    if device.device_type == "TPU":
        # TensorFlow does not say which generation a TPU is of.
        return DeviceInfo("tpu", "TPU", "")
    details = tf.config.experimental.get_device_details(device)
    capability = details.get("compute_capability")
    architecture = ".".join(map(str, capability)) if capability else ""
    return DeviceInfo("gpu", details.get("device_name", device.name), architecture)


def peak_memory_bytes() -> int | None:
    """Measures the most memory in use so far: on the fullest accelerator or, without one, by this process.

    Returns:
        Bytes, or None where the runtime does not tell (TPUs, Metal).
    """
    accelerators = [device for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if not accelerators:
        return peak_process_bytes()
    try:
        # TensorFlow 2.21 answers 0 for a device that keeps no count.
        return max(tf.config.experimental.get_memory_info(device.name)["peak"] for device in accelerators) or None
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None


def version() -> str:
    """Returns TensorFlow's version."""
    return str(tf.__version__)


# tf.nn's attention adds up scores, and takes their softmax, in the operands' dtype.
FUSED_ATTENTION_IN_FLOAT32 = False


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors and returns the float32 sums; see `keras_mp.accumulate`."""
    operands, out = equation.split("->")
    left_labels, right_labels = operands.split(",")
    batch = [label for label in left_labels if label in right_labels and label in out]
    summed = [label for label in left_labels if label in right_labels and label not in out]
    left_free = [label for label in left_labels if label not in right_labels]
    right_free = [label for label in right_labels if label not in left_labels]
    # XLA's compiler for CPUs has no bfloat16 kernel for every layout, but has one for rows times columns.
    left = _transposed(left, left_labels, [*batch, *left_free, *summed])
    right = _transposed(right, right_labels, [*batch, *summed, *right_free])
    first = range(len(batch))
    dimensions = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=first,
        rhs_batch_dimensions=first,
        lhs_contracting_dimensions=[len(batch) + len(left_free) + index for index in range(len(summed))],
        rhs_contracting_dimensions=[len(batch) + index for index in range(len(summed))],
    )
    result = tfxla.dot_general(left, right, dimensions, preferred_element_type=tf.float32)
    return _transposed(result, [*batch, *left_free, *right_free], out)


def _transposed(x: Any, labels: Sequence[str], order: Sequence[str]) -> Any:
    return x if list(labels) == list(order) else tf.transpose(x, [labels.index(label) for label in order])
