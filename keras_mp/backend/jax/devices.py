"""The devices of this machine."""

import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
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
    chip_in_scope,
    chip_of,
)
from keras_mp.backend.common.keras_patches import patched
from keras_mp.system.host import peak_process_bytes
from keras_mp.system.quiet_import import has_chip, quiet_stderr


def local_devices() -> list[DeviceInfo]:
    """Lists the devices of JAX's platform, and the CPU."""
    devices = [_describe(device) for device in _start()]
    if all(device.kind != "cpu" for device in devices):
        devices.append(DeviceInfo("cpu", "", ""))
    return best_first(devices)


def traced_chip() -> TracedChip:
    """Returns the chip that a step is traced for."""
    return chip_in_scope() or chip_of(_describe(jax.devices()[0]))


@contextmanager
def traced_for(chip: TracedChip) -> Iterator[None]:
    """Scope in which Keras, KerasHub and JAX find a chip."""
    with absent_chip(chip), patched(_ANSWERS):
        yield


def _devices(original: Any, chip: TracedChip, backend: Any = None) -> Any:
    if chip.platform == "cpu" or backend not in (None, chip.platform):
        return original("cpu" if backend is None else backend)
    capability = "" if chip.capability is None else str(chip.capability)
    return [SimpleNamespace(platform=chip.platform, device_kind=chip.kind, compute_capability=capability)]


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _has(compared: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    def has(_: Any, chip: TracedChip, capability: str) -> bool:
        return chip.capability is not None and compared(_numbers(str(chip.capability)), _numbers(capability))

    return has


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_ANSWERS = {
    "jax.devices": answered(_devices),
    "jax.default_backend": answered(lambda _, chip: chip.platform),
    f"{_CUDNN}.check_cudnn_version": answered(lambda *_: CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2]),
    f"{_CUDNN}.check_compute_capability": answered(_has(operator.ge)),
    f"{_CUDNN}.is_cuda_compute_capability_equal": answered(_has(operator.eq)),
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
    """Starts JAX where no chip is."""
    # The compilers of [inspect] look for theirs, and write a traceback and pages.
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
        return DeviceInfo("cpu", "", "")
    if device.platform == "tpu":
        return DeviceInfo("tpu", device.device_kind, "")
    return DeviceInfo("gpu", device.device_kind, getattr(device, "compute_capability", ""))


def peak_memory_bytes() -> int | None:
    """Measures the most bytes in use, on the fullest accelerator.

    Without one, of this process; None where the runtime does not tell.
    """
    accelerators = [device for device in _start() if device.platform != "cpu"]
    if not accelerators:
        return peak_process_bytes()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in accelerators]
    return max((peak for peak in peaks if peak is not None), default=None)


# In bfloat16 XLA leaves the gradient of a Dense kernel to a loop, measured 12 times as slow as oneDNN's product (jax
# 0.12.0.1, Zen 4). Without the second option oneDNN would compute softmax, too, which hides NaN: in a row of scores
# with one, all others become finite. Without the third, products would skip roundings to bfloat16, some in one program
# and others in another, so that a base in 16 bits would no longer give the bits of one in float32.
_ONEDNN = {
    "xla_cpu_experimental_onednn_custom_call": True,
    "xla_disable_hlo_passes": "onednn-ops-rewriter",
    "xla_allow_excess_precision": False,
}


def bfloat16_options() -> Mapping[str, Any]:
    """Returns XLA's options for fast bfloat16 products on a CPU.

    Empty before jax 0.12. On jax 0.10.2 they change nothing. They are experimental: a later compiler that does not know
    them is not asked.
    """
    return _known_options() if traced_chip().platform == "cpu" else {}


@cache
def _known_options() -> Mapping[str, Any]:
    if jax.__version_info__ < (0, 12):
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_ONEDNN).lower(0.0).compile()
    except (ValueError, jax.errors.JaxRuntimeError):
        return {}
    return _ONEDNN


def full_float32() -> Any:
    """Scope in which products of float32 are float32."""
    # By default a TPU makes one bfloat16 pass of one.
    return jax.default_matmul_precision("highest")
