"""What the operating system says about the processor, this process, and drivers of accelerators."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# What NVIDIA's driver leaves on the file system: on Linux, and on Linux under Windows (WSL).
NVIDIA_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))

_CPUINFO = Path("/proc/cpuinfo")


def _cpuinfo(*keys: str) -> str:
    """The first value of /proc/cpuinfo with one of these keys."""
    if not _CPUINFO.exists():
        return ""
    for line in _CPUINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _sysctl(*names: str) -> str:
    """What macOS prints for these names."""
    # With an error status it leaves out those that the machine lacks.
    if sys.platform != "darwin":
        return ""
    try:
        return subprocess.run(["sysctl", *names], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _sysctl_flags(printed: str) -> frozenset[str]:
    """Flags of lines such as `hw.optional.arm.FEAT_BF16: 1`."""
    flags = set()
    for line in printed.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("machdep.cpu."):
            flags.update(value.lower().split())
        elif value.strip() == "1":
            flags.add(name.rpartition(".")[2].lower().removeprefix("feat_"))
    return frozenset(flags)


def cpu_name() -> str:
    """Names the processor or the machine type: "AMD EPYC 9654"."""
    _, _, brand = _sysctl("machdep.cpu.brand_string").partition(":")
    return _cpuinfo("model name") or brand.strip() or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Lists instruction sets: "avx512_bf16", on Arm "bf16"; empty if untold."""
    flags = _cpuinfo("flags", "Features")
    if flags:
        return frozenset(flags.split())
    return _sysctl_flags(_sysctl("hw.optional", "machdep.cpu.features", "machdep.cpu.leaf7_features"))


def peak_process_bytes() -> int | None:
    """Measures this process's peak resident set; None on Windows."""
    # Not getrusage(2) where it can be avoided: its peak begins with what the parent held when it started this process.
    peak = _kilobytes(Path("/proc/self/status"), "VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    peak_size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return peak_size if sys.platform == "darwin" else peak_size * 1024


def resident_bytes() -> int | None:
    """Measures this process's resident set; None but on Linux."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS")


def forget_peak() -> bool:
    """Lets `peak_process_bytes` begin anew, where the system can: Linux."""
    try:
        # proc(5): writing 5 resets the peak resident set.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(path: Path, key: str) -> int | None:
    """The bytes of a file's line "key: number kB"."""
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def available_bytes() -> int | None:
    """Measures memory free without swapping; None but on Linux."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


# Accelerators whose driver is on this machine, and what makes a backend see them.


class Driver(NamedTuple):
    """Traces of a driver, its accelerator, and backends' packages."""

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
    """Lists packages by which a backend sees this machine's accelerators."""
    packages = [driver.package(backend) for driver in _here()]
    return [package for package in packages if package]


def unseen_accelerators(backend: str, kind: str) -> list[str]:
    """Names accelerators that the backend does not see.

    Args:
        kind: the kind of the device that Keras computes on; with "gpu" or "tpu" there is nothing to say.

    Returns:
        A sentence for each; none where the environment hides them: `CUDA_VISIBLE_DEVICES=""`, `JAX_PLATFORMS=cpu`.
    """
    if backend == "jax":
        hidden = os.environ.get("JAX_PLATFORMS", "") == "cpu"
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if kind != "cpu" or hidden:
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
