"""The chips that a step can be compiled for without being attached, and what their compilers need to be told."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from keras_mp.lowering import CUDNN, TracedChip, traced
from keras_mp.precision.chip import Chip, GpuDescription, TpuSlices
from keras_mp.precision.chips import CHIPS, nearest_hint, target_in
from keras_mp.system.packages import install_command

HOST_TITLE = "this machine's CPU"

# Slices by their number of chips, as libtpu describes them: of chips wired in two dimensions, and in three. A step on
# one device is compiled for the smallest.
_SLICES = {
    2: {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
}
_SMALLEST_SLICE = 4
# As many GPUs of one host can share a step.
_GPUS = (2, 4, 8)


@dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Args:
        name: the name in `keras_mp.chips.CHIPS`, or "host".
        platform: "cuda", "tpu" or "cpu".
        chip: the row of the chip there; None for the host.
        topology: the name that libtpu has for a slice of it; of several GPUs slices x hosts x GPUs of a host, "" of
            one.
        configuration: the description that XLA's compiler for GPUs wants, a text protocol buffer.
        flags: the compiler's options that differ from its defaults.
        chips: the number of chips, of a slice or of a host with several GPUs, that share a step.
    """

    name: str
    platform: str
    chip: Chip | None = None
    topology: str = ""
    configuration: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    chips: int = 1

    @property
    def devices(self) -> int:
        """How many devices share a step: of some TPUs a chip is two, of which one alone is compiled for."""
        return self.chips * self.chip.devices if self.chip and self.chips > 1 else 1

    @property
    def traced(self) -> TracedChip:
        """The chip as Keras finds it when a step is traced there."""
        return traced(self.chip)

    @property
    def libraries(self) -> dict[str, str]:
        """The versions of the libraries that it is compiled for, and that are not needed to compile."""
        return {"cuDNN": ".".join(map(str, CUDNN))} if self.platform == "cuda" else {}

    @property
    def title(self) -> str:
        """The name that people use."""
        return self.chip.title if self.chip else HOST_TITLE


def target_names() -> list[str]:
    """Lists what `find_target` knows."""
    return [*(name for name, chip in CHIPS.items() if chip.compiler is not None), "host"]


def find_target(name: str) -> Target:
    """Looks a target up.

    Args:
        name: a chip's name, such as "h100" or "v5e", or several, such as "h100x8" or "v5e-8", in any spelling that
            `keras_mp.precision.chips.parse_target` reads; or "host".

    Returns:
        The target: a chip, a slice of TPUs, or the GPUs of one host.

    Raises:
        ValueError: If there is no such target, the message then lists those there are, and the nearest; or no such
            number of chips.
    """
    if is_host(str(name)):
        return Target("host", "cpu")
    known = target_names()
    named = target_in(str(name))
    if named is None:
        raise ValueError(f"target={name!r} is not known.{nearest_hint(name, known)} Known: {', '.join(known)}.")
    chip, chips = named
    if isinstance(chip.compiler, TpuSlices):
        sizes = _SLICES[chip.compiler.dimensions]
        _check_number(name, chip, chips, tuple(sizes), "the slices")
        size = _SMALLEST_SLICE if chips == 1 else chips
        return Target(chip.name, "tpu", chip, topology=f"{chip.compiler.family}:{sizes[size]}", chips=chips)
    if isinstance(chip.compiler, GpuDescription):
        _check_number(name, chip, chips, _GPUS, "the numbers of GPUs of one host")
        # Autotuning times kernels on the chip, which is not there.
        flags = {"xla_gpu_autotune_level": 0}
        topology = f"1x1x{chips}" if chips > 1 else ""
        configuration = _configuration(chip.compiler, chip.architecture)
        return Target(chip.name, "cuda", chip, topology, configuration, flags, chips)
    too_old = f" (compute capability {chip.architecture}): the one for CUDA 13 begins with 7.5"
    raise ValueError(
        f"target={name!r} is not known: no compiler that can be installed takes {chip.title}"
        f"{too_old if chip.vendor == 'nvidia' else ''}. Known: {', '.join(known)}."
    )


def is_host(name: str) -> bool:
    """Whether a target's name is that of this machine's CPU."""
    return name.strip().lower() in ("host", "cpu", HOST_TITLE.lower())


def _check_number(name: str, chip: Chip, chips: int, sizes: tuple[int, ...], several: str) -> None:
    if chips != 1 and chips not in sizes:
        raise ValueError(
            f"target={name!r} names {chips} chips, which is not one of {', '.join(map(str, sizes))}, {several} of "
            f"{chip.title}"
        )


def missing_compiler(target: Target) -> str:
    """Says how to install a target's missing compiler, or ""."""
    needed = {"cpu": ["jax"], "tpu": ["jax", "libtpu"], "cuda": ["jax", "jax_cuda13_plugin"]}[target.platform]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    packages = " and ".join(missing)
    return f"To compile for {target.title} here, {packages} must be installed: {install_command('inspect')}."


def _configuration(gpu: GpuDescription, capability: str) -> str:
    major, minor = capability.split(".")
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {gpu.device_name}"
"""
