"""Whether a dtype pays on a device, and why."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import keras

from keras_mp import backend
from keras_mp.backend.common.device import chip_in_scope
from keras_mp.precision.chips import Chip, identify_chip
from keras_mp.system.argument_checks import one_of
from keras_mp.system.host import cpu_flags, cpu_name

DTYPES = ("float32", "float16", "bfloat16", "fp8")
MXFP8 = "mxfp8"
"""Matrix products of operands in MXFP8, a property of few chips, which the lists of dtypes leave out."""

_CPU_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
# NVIDIA's TU116 and TU117, by the names of the products that are made of them: CUDA programs cannot tell them apart.
_TURING_WITHOUT_TENSOR_CORES = r"\bGTX 16\d0|\bMX ?[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b"
_EMULATED = "the compiler emulates FP8 there: the same numerics, none of the speed"


class Support(NamedTuple):
    """Whether training pays on a device, and why."""

    ok: bool
    reason: str  # a full sentence that names the device and says what follows


@dataclass(frozen=True)
class Device:
    """A kind of device that Keras computes on."""

    kind: str  # "cpu", "gpu" or "tpu"
    name: str  # as the runtime calls it
    architecture: str = ""  # compute capability ("9.0"), LLVM target ("gfx942"), TPU generation ("v5e"), "" if unknown
    chip: Chip | None = None  # its row in `keras_mp.precision.chips`
    flags: frozenset[str] = frozenset()  # instruction sets of a CPU, in Linux's spelling, where they are known
    count: int = 1  # of such devices in this process

    @property
    def vendor(self) -> str:
        """The maker: "nvidia", "amd", "google", "apple", or "" if unknown."""
        if self.chip is not None:
            return self.chip.vendor
        if self.kind == "tpu":
            return "google"
        if self.kind == "gpu" and re.fullmatch(r"\d+\.\d+", self.architecture):
            return "nvidia"
        if self.kind == "gpu" and self.architecture.startswith("gfx"):
            return "amd"
        if self.kind == "gpu" and re.search("metal|apple", self.name, re.IGNORECASE):
            return "apple"
        return ""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """An NVIDIA GPU's (major, minor)."""
        major, minor = self.architecture.split(".")
        return int(major), int(minor)


def list_devices() -> list[Device]:
    """Lists the devices of this process by kind.

    Equal ones stand together, the best kind first.

    Returns:
        At least the CPU.

    Raises:
        RuntimeError: If the backend cannot start its devices.
    """
    counted = Counter(backend.local_devices())
    devices = []
    for info, count in counted.items():
        if info.kind == "cpu":
            devices.append(Device("cpu", cpu_name(), "", None, cpu_flags(), count))
        else:
            chip = identify_chip(info.name)
            architecture = info.architecture or (chip.architecture if chip else "")
            devices.append(Device(info.kind, info.name, architecture, chip, frozenset(), count))
    return devices


def current_device() -> Device:
    """Finds the device that Keras computes on.

    It is the first TPU, else the first GPU, else the CPU. Where a model is built for a chip that is not there, it is
    that chip. The backend is asked on every call, because a program may hide devices after its first question.
    """
    absent = chip_in_scope()
    if absent is None:
        return list_devices()[0]
    if absent.platform == "cpu":
        return next(device for device in list_devices() if device.kind == "cpu")
    chip = identify_chip(absent.kind)
    architecture = chip.architecture if chip else str(absent.capability or "")
    return Device(absent.platform, absent.kind, architecture, chip)


def support(dtype: str, device: Device | None = None) -> Support:
    """Says whether training in a dtype pays on a device.

    Args:
        dtype: The dtype: "float32", "float16", "bfloat16", "fp8" or "mxfp8". The last two mean matrix products of FP8
            operands, of which blocks have scales in MXFP8.
        device: The device to judge; by default the one that Keras computes on.

    Returns:
        `Support(ok, reason)`.

    Raises:
        ValueError: If the dtype is none of these.
    """
    one_of("dtype", dtype, (*DTYPES, MXFP8))
    device = device or current_device()
    if dtype == MXFP8:
        return _mxfp8(device)
    if dtype == "float32":
        return _float32(device)
    if device.kind == "cpu":
        return _cpu(dtype, device)
    if device.kind == "tpu":
        return _tpu(dtype, device)
    if device.vendor == "nvidia":
        return _nvidia(dtype, device)
    if device.vendor == "amd":
        return _amd(dtype, device)
    if device.vendor == "apple":
        return Support(False, f"{device.name} is an Apple GPU, and {dtype} has not been measured there.")
    return Support(False, f"{device.name} is a GPU of an unknown vendor: whether {dtype} pays is not known.")


def _mxfp8(device: Device) -> Support:
    if device.vendor != "nvidia":
        return Support(False, f"{device.name} multiplies no MXFP8 operands, as far as is known; {_EMULATED}.")
    name = f"{device.name} (compute capability {device.architecture})"
    # NVIDIA, cuDNN documentation, block scale quantization: "Blackwell and later".
    if device.compute_capability < (10, 0):
        return Support(False, f"{name} does not multiply MXFP8 operands (10.0 is the first); {_EMULATED}.")
    if keras.backend.backend() != "jax":
        return Support(False, f"{name} multiplies MXFP8 operands, but TensorFlow has no such product: use JAX.")
    return Support(True, f"{name} has MXFP8 tensor cores, as from 10.0 on.")


def _float32(device: Device) -> Support:
    if device.kind == "tpu":
        return Support(True, f"{device.name} runs float32, but rounds the operands of matrix products to bfloat16.")
    return Support(True, f"{device.name} computes in float32.")


def _cpu(dtype: str, device: Device) -> Support:
    if dtype == "fp8":
        return Support(False, f"{device.name} has no FP8 instructions; {_EMULATED}.")
    if dtype == "float16":
        # Measured with TensorFlow 2.21 on Zen: 1.2 times for dense layers, 4.5 times for convolutions.
        return Support(False, f"{device.name} is slower in float16 than in float32: 1.2 to 4.5 times as measured.")
    flags = sorted(device.flags & _CPU_BFLOAT16_FLAGS)
    if flags:
        return Support(True, f"{device.name} has bfloat16 instructions ({', '.join(flags)}).")
    if "bf16" in device.flags:
        return Support(False, f"{device.name} has Arm's bf16 instructions, which have not been measured.")
    if not device.flags:
        return Support(False, f"{device.name} may or may not have avx512_bf16: this system does not report it.")
    return Support(False, f"{device.name} has neither avx512_bf16 nor amx_bf16, so bfloat16 would be slower.")


def _tpu(dtype: str, device: Device) -> Support:
    if dtype == "bfloat16":
        return Support(True, f"{device.name} multiplies matrices in bfloat16.")
    if dtype == "float16":
        return Support(False, f"{device.name} has no float16 hardware; bfloat16 is its 16-bit format.")
    if device.chip is not None and "fp8" in device.chip.peak:
        times = device.chip.peak["fp8"] / device.chip.peak["bfloat16"]
        return Support(True, f"{device.name} multiplies FP8 matrices at {times:.3g} times its bfloat16 rate.")
    if not device.architecture:
        return Support(False, f"{device.name} is of an unknown generation; before TPU7x there is no FP8 hardware.")
    return Support(False, f"{device.name} has no FP8 hardware (TPU7x is the first); {_EMULATED}.")


def _nvidia(dtype: str, device: Device) -> Support:
    first = {"float16": (7, 0), "bfloat16": (8, 0), "fp8": (8, 9)}[dtype]
    name = f"{device.name} (compute capability {device.architecture})"
    needed = f"{first[0]}.{first[1]}"
    if device.architecture == "7.5" and re.search(_TURING_WITHOUT_TENSOR_CORES, device.name):
        return Support(False, f"{name} has no tensor cores, unlike other GPUs of this compute capability.")
    if device.compute_capability >= first:
        return Support(True, f"{name} has {dtype} tensor cores, as from {needed} on.")
    if dtype == "fp8":
        return Support(False, f"{name} has no FP8 tensor cores ({needed} is the first); {_EMULATED}.")
    return Support(False, f"{name} has no {dtype} tensor cores; they begin with {needed}.")


def _amd(dtype: str, device: Device) -> Support:
    # LLVM targets of the CDNA generations: gfx908 (1), gfx90a (2), gfx940 to gfx942 (3), gfx950 (4). What a chip
    # multiplies in: ROCm documentation, "AMD CDNA architecture", table of data types.
    target = device.architecture.split(":")[0]
    name = f"{device.name} ({target})"
    if not re.fullmatch(r"gfx908|gfx90a|gfx9[45].", target):
        return Support(False, f"{name} is not of AMD's CDNA line, and {dtype} has not been measured on it.")
    if dtype == "float16":
        return Support(True, f"{name} has float16 matrix cores.")
    if dtype == "bfloat16" and target == "gfx908":
        return Support(False, f"{name} multiplies bfloat16 at half its float16 rate; CDNA2 (gfx90a) ends that.")
    if dtype == "bfloat16":
        return Support(True, f"{name} has bfloat16 matrix cores at the float16 rate.")
    if target.startswith("gfx94"):
        return Support(False, f"{name} has FP8 in other formats only (FNUZ); {_EMULATED}.")
    if target.startswith("gfx95"):
        return Support(False, f"{name} has FP8 matrix cores, whose use has not been tested.")
    return Support(False, f"{name} has no FP8 hardware; {_EMULATED}.")


def choose_jit(policy: str = "", device: Device | None = None) -> Support:
    """Says whether to compile steps with XLA, and why."""
    device = device or current_device()
    if keras.backend.backend() == "jax":
        return Support(True, "Jit is on: without it JAX dispatches every operation from Python.")
    # Median step without and with jit on 2 Zen 5 cores, keras 3.15.1, TensorFlow 2.21.0. A 6-convolution network,
    # batch 64 of 32 x 32: float32 52 and 83 ms, bfloat16 44 and 82. A 4-layer, width-256 transformer, batch
    # 8 x 128: float32 94 and 88 ms, bfloat16 81 and 91. So jit gains at most 6% there, and loses up to 86%.
    # A 2-layer, width-128 transformer, batch 48 x 64, seconds of processor a step on Zen 5, keras 3.15.1, TensorFlow
    # 2.21.0: 272 ms without jit, 168 with.
    if device.kind == "cpu" and policy == "fp8":
        return Support(True, "Jit is on: it fuses the many small steps of rounding to FP8.")
    if device.kind == "cpu":
        return Support(False, "Jit is off: on a CPU it makes convolutions slower and little else faster.")
    if device.vendor == "apple":
        return Support(False, "Jit is off: TensorFlow's plugin for Metal has no XLA.")
    return Support(True, "Jit is on: XLA fuses the casts into their neighbours.")
