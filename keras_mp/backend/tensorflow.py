"""What is TensorFlow's own: its devices, their memory, its version, its contraction of 16-bit operands."""

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
    dimensions = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=map(left_labels.index, batch),
        rhs_batch_dimensions=map(right_labels.index, batch),
        lhs_contracting_dimensions=map(left_labels.index, summed),
        rhs_contracting_dimensions=map(right_labels.index, summed),
    )
    result = tfxla.dot_general(left, right, dimensions, preferred_element_type=tf.float32)
    order = [
        *batch,
        *(x for x in left_labels if x not in right_labels),
        *(x for x in right_labels if x not in left_labels),
    ]
    return result if order == list(out) else tf.transpose(result, [order.index(label) for label in out])
