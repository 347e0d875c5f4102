"""What is JAX's own: its devices, their memory, its version, its contraction of 16-bit operands."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.backend.device import DeviceInfo, best_first
from keras_mp.backend.host import cpu_name, peak_process_bytes


def local_devices() -> list[DeviceInfo]:
    """Lists the devices that JAX may use in this process, the best kind first.

    Returns:
        One entry per device of JAX's default platform, and the host's CPU.

    Raises:
        RuntimeError: If JAX cannot start its devices.
    """
    devices = [_describe(device) for device in _start()]
    if all(device.kind != "cpu" for device in devices):
        devices.append(DeviceInfo("cpu", cpu_name(), ""))
    return best_first(devices)


def _start() -> list[jax.Device]:
    try:
        return jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        hint = f" JAX_PLATFORMS={platforms!r} allows no other device: unset it to use the CPU." if platforms else ""
        raise RuntimeError(f"JAX {jax.__version__} could not start its devices: {error}{hint}") from error


def _describe(device: jax.Device) -> DeviceInfo:
    if device.platform == "cpu":
        return DeviceInfo("cpu", cpu_name(), "")
    if device.platform == "tpu":
        return DeviceInfo("tpu", device.device_kind, "")
    return DeviceInfo("gpu", device.device_kind, getattr(device, "compute_capability", ""))


def peak_memory_bytes() -> int | None:
    """Measures the most memory in use so far: on the fullest accelerator or, without one, by this process.

    Returns:
        Bytes, or None where the runtime does not tell.
    """
    accelerators = [device for device in _start() if device.platform != "cpu"]
    if not accelerators:
        return peak_process_bytes()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in accelerators]
    return max((peak for peak in peaks if peak is not None), default=None)


def version() -> str:
    """Returns JAX's version."""
    return str(jax.__version__)


# jax.nn.dot_product_attention adds up scores, and takes their softmax, in float32.
FUSED_ATTENTION_IN_FLOAT32 = True


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors and returns the float32 sums; see `keras_mp.accumulate`."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
