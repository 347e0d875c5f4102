"""Devices as the runtimes would describe them, for tests that run on none of them."""

from keras_mp.precision.chips import CHIPS
from keras_mp.precision.hardware import Device


def chip_device(name: str) -> Device:
    """The device of a chip in the table."""
    chip = CHIPS[name]
    return Device("tpu" if chip.vendor == "google" else "gpu", chip.title, chip.architecture, chip)


def cpu(*flags: str) -> Device:
    """A CPU with these flags."""
    return Device("cpu", "Some CPU", flags=frozenset(flags))


TPUS = [chip_device(name) for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")]
P100, V100, T4, A100, L4, H100, H200, B200 = map(chip_device, "p100 v100 t4 a100 l4 h100 h200 b200".split())
MI100, MI250X, MI300X = map(chip_device, "mi100 mi250x mi300x".split())
MI350X = Device("gpu", "AMD Instinct MI350X", "gfx950")
RTX_3060 = Device("gpu", "NVIDIA GeForce RTX 3060", "8.6")
RADEON = Device("gpu", "AMD Radeon RX 7900 XTX", "gfx1100")
METAL = Device("gpu", "METAL")
ARC = Device("gpu", "Intel Arc A770")
UNKNOWN_TPU = Device("tpu", "TPU")

PLAIN_CPU = cpu("sse2", "avx2")
AVX512_CPU = cpu("avx2", "avx512f", "avx512_bf16")
AMX_CPU = cpu("avx2", "amx_tile", "amx_bf16")
ARM_CPU = cpu("asimd", "bf16", "sve")
SILENT_CPU = cpu()
CPUS = [PLAIN_CPU, AVX512_CPU, AMX_CPU, ARM_CPU, SILENT_CPU]

ALL = [
    *(*TPUS, UNKNOWN_TPU, P100, V100, T4, A100, RTX_3060, L4, H100, H200, B200),
    *(MI100, MI250X, MI300X, MI350X, RADEON, METAL, ARC, *CPUS),
]
