"""The devices of this machine."""

import logging
import os
from functools import cache

import jax

from keras_mp.backend.common.device import DeviceInfo, best_first, platform_traced_for
from keras_mp.system.host import cpu_name, peak_process_bytes
from keras_mp.system.quiet_import import has_chip, quiet_stderr


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


def platform_compiled_for() -> str:
    """The platform that a program which is traced now is for: this machine's, or what `traced_for` says."""
    return platform_traced_for() or jax.default_backend()


def _start() -> list[jax.Device]:
    try:
        if not has_chip():
            _look_quietly()
        return jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        hint = f" JAX_PLATFORMS={platforms!r} allows no other device: unset it to use the CPU." if platforms else ""
        raise RuntimeError(f"JAX {jax.__version__} could not start its devices: {error}{hint}") from error


@cache
def _look_quietly() -> None:
    """Starts JAX where no chip is: the compilers of [inspect] look for theirs, and write a traceback and pages."""
    log = logging.getLogger("jax._src.xla_bridge")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with quiet_stderr():
            jax.local_devices()
    finally:
        log.setLevel(level)


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
