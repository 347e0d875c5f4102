"""The devices of this machine."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax

from keras_mp.backend.common.device import (
    CUDNN,
    DeviceInfo,
    TracedChip,
    absent_chip,
    answered,
    best_first,
    capability_of,
    chip_in_scope,
)
from keras_mp.backend.common.keras_patches import patched
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


def traced_chip() -> TracedChip:
    """Returns the chip that a step is traced for: this machine's own first device, or what `traced_for` says."""
    chip = chip_in_scope()
    if chip is None:
        device = jax.devices()[0]
        kind, _, architecture = _describe(device)
        chip = TracedChip(kind, capability_of(architecture), device.device_kind)
    return chip


@contextmanager
def traced_for(chip: TracedChip) -> Iterator[None]:
    """Traces steps for a chip that need not be there: within it Keras, KerasHub and JAX find it, in this thread."""
    with absent_chip(chip), patched(_ANSWERS):
        yield


def _devices(original: Any, chip: TracedChip, backend: Any = None) -> Any:
    if chip.platform == "cpu" or backend not in (None, chip.platform):
        return original("cpu" if backend is None else backend)
    capability = "" if chip.capability is None else str(chip.capability)
    return [SimpleNamespace(platform=chip.platform, device_kind=chip.kind, compute_capability=capability)]


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _has_at_least(_: Any, chip: TracedChip, capability: str) -> bool:
    return chip.capability is not None and _numbers(str(chip.capability)) >= _numbers(capability)


def _has_exactly(_: Any, chip: TracedChip, capability: str) -> bool:
    return chip.capability is not None and _numbers(str(chip.capability)) == _numbers(capability)


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_ANSWERS = {
    "jax.devices": answered(_devices),
    "jax.default_backend": answered(lambda _, chip: chip.platform),
    f"{_CUDNN}.check_cudnn_version": answered(lambda *_: CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2]),
    f"{_CUDNN}.check_compute_capability": answered(_has_at_least),
    f"{_CUDNN}.is_cuda_compute_capability_equal": answered(_has_exactly),
}


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
