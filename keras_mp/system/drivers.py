"""Accelerators whose driver is on this machine, and what makes a backend see them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from keras_mp.system.host import NVIDIA_DRIVER


class Driver(NamedTuple):
    """What a driver leaves on the file system, the accelerator, and the package that makes each backend see it."""

    traces: tuple[Path, ...]
    accelerator: str
    tensorflow: str
    jax: str

    def package(self, backend: str) -> str:
        return self.tensorflow if backend == "tensorflow" else self.jax


DRIVERS = (
    Driver(NVIDIA_DRIVER, "NVIDIA GPU", "tensorflow[and-cuda]", "jax[cuda13]"),
    Driver((Path("/dev/kfd"),), "AMD GPU", "tensorflow-rocm", "jax[rocm7-local]"),
    Driver((Path("/dev/accel0"),), "TPU", "", "jax[tpu]"),
)


def packages_for(backend: str) -> list[str]:
    """The packages with which a backend sees the accelerators whose drivers are on this machine."""
    packages = [driver.package(backend) for driver in _here()]
    return [package for package in packages if package]


def unseen_accelerators(backend: str, kind: str) -> list[str]:
    """Names accelerators whose driver is here while the backend computes on a CPU, and says what to install.

    Args:
        backend: "tensorflow" or "jax".
        kind: of the device that Keras computes on; with "gpu" or "tpu" there is nothing to say.

    Returns:
        A sentence for each; none where the environment hides them: `CUDA_VISIBLE_DEVICES=""`, `JAX_PLATFORMS=cpu`.
    """
    if kind != "cpu" or _hidden(backend):
        return []
    messages = []
    for driver in _here():
        package = driver.package(backend)
        way_out = f'pip install "{package}"' if package else f'pip install "{driver.jax}", export KERAS_BACKEND=jax'
        messages.append(
            f"This machine has the driver of an {driver.accelerator}, which {backend} does not see: {way_out}"
        )
    return messages


def _here() -> list[Driver]:
    return [driver for driver in DRIVERS if any(trace.exists() for trace in driver.traces)]


def _hidden(backend: str) -> bool:
    if backend == "jax":
        return os.environ.get("JAX_PLATFORMS", "") == "cpu"
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
