"""A table of chips: the dtypes that each multiplies in, its rates and its memory, with their sources."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

TERA = 1e12
GIGA = 1e9
# Vendors write GB for the memory of an accelerator and mean 2**30 bytes: an "80 GB" H100 reports 84.9e9 bytes.
GIB = 2**30


@dataclass(frozen=True)
class GpuDescription:
    """The description of a GPU that XLA's compiler for NVIDIA needs where it is not attached.

    Sources: the target descriptions in XLA's repository (xla/backends/gpu/target_config/specs, as of 2026) for A100,
    H100, H200 and B200; for T4 and L4 the output of deviceQuery for memory, clock and L2, and the table of compute
    capabilities 7.5 and 8.9 in the CUDA C++ Programming Guide for the figures of a multiprocessor.

    Args:
        device_name: The name that the driver reports, without "NVIDIA".
        cores: Multiprocessors.
        lanes: Float32 lanes of a multiprocessor.
        threads: Most threads of a multiprocessor.
        shared_per_core: Shared memory of a multiprocessor, in bytes.
        shared_per_block: Most shared memory that a block may ask for, in bytes.
        l2: Size of the L2 cache, in bytes.
        clock: In GHz.
        memory: Device memory that the driver reports, in bytes.
        bandwidth: Device memory bandwidth, in bytes per second.
    """

    device_name: str
    cores: int
    lanes: int
    threads: int
    shared_per_core: int
    shared_per_block: int
    l2: int
    clock: float
    memory: int
    bandwidth: int


@dataclass(frozen=True)
class TpuSlices:
    """The names in libtpu of the slices of a TPU that is not attached.

    Args:
        family: libtpu's name of the chip, such as "tpu7x".
        dimensions: In how many dimensions its chips are wired, 2 or 3.
    """

    family: str
    dimensions: int


@dataclass(frozen=True)
class Chip:
    """One accelerator as it is sold: a whole chip or module.

    Args:
        name: The key in `CHIPS`, such as "h100".
        title: The name people use, with the form that the figures are for.
        vendor: "nvidia", "google" or "amd".
        architecture: Compute capability ("9.0"), TPU generation ("v5e") or LLVM target ("gfx942").
        peak: Dense operations per second (a multiply-add is two) by operand dtype: "float32", "tfloat32", "float16",
            "bfloat16", "fp8". A missing key means that the chip has no hardware for it.
        memory_bytes: Device memory in bytes.
        bandwidth: Device memory bandwidth in bytes per second.
        source: The document that each figure is from.
        devices: How many devices the runtime makes of one chip; a device then has that share of every figure.
        compiler: How the compiler is told of the chip; None where no compiler that can be installed takes it.
        device_kinds: Names that a runtime gives the chip and that do not hold `name`, in lower case; of TPUs those of
            jax/_src/pallas/mosaic/tpu_info.py in JAX 0.10.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    peak: Mapping[str, float]
    memory_bytes: int
    bandwidth: float
    source: str
    devices: int = 1
    compiler: GpuDescription | TpuSlices | None = None
    device_kinds: tuple[str, ...] = ()


def _chip(
    name: str,
    title: str,
    vendor: str,
    architecture: str,
    peak: dict[str, float],
    memory: int,
    bandwidth: float,
    source: str,
    devices: int = 1,
    compiler: GpuDescription | TpuSlices | None = None,
    device_kinds: tuple[str, ...] = (),
) -> Chip:
    """Builds a row from the units that data sheets use: teraflops, GiB and GB/s."""
    rates = MappingProxyType({dtype: teraflops * TERA for dtype, teraflops in peak.items()})
    size, speed = memory * GIB, bandwidth * GIGA
    return Chip(name, title, vendor, architecture, rates, size, speed, source, devices, compiler, device_kinds)


_GOOGLE = "Google Cloud documentation, https://docs.cloud.google.com/tpu/docs/"
_ROCM = "ROCm documentation, https://rocm.docs.amd.com/en/latest/reference/gpu-arch/"
_SPARSE = "; the tensor-core figures are half of the sparse ones printed there"
# NVIDIA's own pages could not be opened when this was written. What stands in for them is said in each row, and
# the tests compute every figure again from the number of units, their width and their clock.
_NOT_OPENED = "; NVIDIA's page itself not opened, figures checked against "

# fmt: off
_ROWS = (
    _chip(
        "v2", "TPU v2", "google", "v2", {"bfloat16": 45}, 16, 700,
        _GOOGLE + "v2 (page not opened; 4 chips x 45 = the 180 teraflops of Google's TPU v2 board)",
        devices=2,
    ),
    _chip("v3", "TPU v3", "google", "v3", {"bfloat16": 123}, 32, 900, _GOOGLE + "v3", devices=2),
    _chip(
        "v4", "TPU v4", "google", "v4", {"bfloat16": 275}, 32, 1200,
        _GOOGLE + "v4",
        compiler=TpuSlices("v4", 3),
    ),
    _chip(
        "v5e", "TPU v5e", "google", "v5e", {"bfloat16": 197}, 16, 819,
        _GOOGLE + "v5e (a later version of the page says 800 GiB/s)",
        compiler=TpuSlices("v5e", 2), device_kinds=("tpu v5 lite",),
    ),
    _chip(
        "v5p", "TPU v5p", "google", "v5p", {"bfloat16": 459}, 95, 2765,
        _GOOGLE + "tpu7x, the table of three generations (its FP8 rate is the bfloat16 rate: no FP8 hardware)",
        compiler=TpuSlices("v5p", 3), device_kinds=("tpu v5",),
    ),
    _chip(
        "v6e", "TPU v6e (Trillium)", "google", "v6e", {"bfloat16": 918}, 32, 1638,
        _GOOGLE + "v6e, and no FP8 hardware from tpu7x, where its FP8 rate is the bfloat16 rate",
        compiler=TpuSlices("v6e", 2), device_kinds=("tpu v6 lite",),
    ),
    _chip(
        "v7x", "TPU7x (Ironwood)", "google", "v7x", {"bfloat16": 2307, "fp8": 4614}, 192, 7380, _GOOGLE + "tpu7x",
        devices=2,
        compiler=TpuSlices("tpu7x", 3), device_kinds=("tpu7x",),
    ),
    _chip(
        "p100", "Tesla P100 SXM2", "nvidia", "6.0", {"float32": 10.6, "float16": 21.2}, 16, 732,
        "NVIDIA Tesla P100 data sheet, https://www.nvidia.com/en-us/data-center/tesla-p100/; float16 is plain "
        "arithmetic, there are no tensor cores" + _NOT_OPENED + "56 SMs x 64 lanes x 1480 MHz",
    ),
    _chip(
        "v100", "Tesla V100 SXM2 16GB", "nvidia", "7.0", {"float32": 15.7, "float16": 125}, 16, 900,
        "NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/; 125 also from "
        "https://developer.nvidia.com/programming-tensor-cores-cuda-9-0, which was opened",
    ),
    _chip(
        "t4", "Tesla T4", "nvidia", "7.5", {"float32": 8.1, "float16": 65}, 16, 320,
        "NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/ (some versions say 300 GB/s)"
        + _NOT_OPENED + "a deviceQuery of a T4: 40 SMs, 1590 MHz, 256 bits at 5001 MHz",
        compiler=GpuDescription(
            "Tesla T4", 40, 64, 1024, 65536, 65536, 4194304, 1.59, 15828320256, 320064 * 10**6,
        ),
    ),
    _chip(
        "a100", "A100 SXM4 80GB", "nvidia", "8.0",
        {"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312}, 80, 2039,
        "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/, the dense column"
        + _NOT_OPENED + "https://www.microway.com/knowledge-center-articles/"
        "in-depth-comparison-of-nvidia-ampere-gpu-accelerators/ for float32, bandwidth and memory",
        compiler=GpuDescription(
            "A100-SXM4-80GB", 108, 64, 2048, 167936, 166912, 41943040, 1.41, 85100068864, 2039040 * 10**6,
        ),
    ),
    _chip(
        "l4", "L4", "nvidia", "8.9",
        {"float32": 30.3, "tfloat32": 60, "float16": 121, "bfloat16": 121, "fp8": 242.5}, 24, 300,
        "NVIDIA L4 product page, https://www.nvidia.com/en-us/data-center/l4/" + _SPARSE
        + _NOT_OPENED + "58 SMs x 2040 MHz only",
        compiler=GpuDescription(
            "L4", 58, 128, 1536, 102400, 101376, 50331648, 2.04, 23660331008, 300096 * 10**6,
        ),
    ),
    _chip(
        "h100", "H100 SXM5", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9}, 80, 3350,
        "NVIDIA H100 product page, https://www.nvidia.com/en-us/data-center/h100/" + _SPARSE
        + _NOT_OPENED + "https://glennklockwood.com/garden/processors/h100",
        compiler=GpuDescription(
            "H100 80GB HBM3", 132, 128, 2048, 233472, 232448, 52428800, 1.98, 84942979072, 3352 * 10**9,
        ),
    ),
    _chip(
        "h200", "H200 SXM", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9}, 141, 4800,
        "NVIDIA H200 product page, https://www.nvidia.com/en-us/data-center/h200/" + _SPARSE
        + _NOT_OPENED + "https://glennklockwood.com/garden/processors/h100 for the rates (those of the H100); "
        "the bandwidth could not be checked",
        compiler=GpuDescription(
            "H200", 132, 128, 2048, 233472, 232448, 52428800, 1.98, 151397597184, 4800 * 10**9,
        ),
    ),
    _chip(
        "b200", "B200 (HGX, 1000 W)", "nvidia", "10.0",
        {"float32": 75, "tfloat32": 1100, "float16": 2250, "bfloat16": 2250, "fp8": 4500}, 180, 7700,
        "NVIDIA Blackwell data sheet, HGX B200 column, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
        + _SPARSE + _NOT_OPENED
        + "the copy of its table at https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html",
        compiler=GpuDescription(
            "B200", 148, 128, 2048, 233472, 232448, 132644864, 1.965, 191514411008, 7672320 * 10**6,
        ),
    ),
    _chip(
        "mi100", "Instinct MI100", "amd", "gfx908", {"float32": 46.1, "float16": 184.6, "bfloat16": 92.3}, 32, 1228.8,
        _ROCM + "mi100.html, the matrix rows",
    ),
    _chip(
        "mi250x", "Instinct MI250X", "amd", "gfx90a", {"float32": 95.7, "float16": 383, "bfloat16": 383}, 128, 3276.8,
        "AMD Instinct MI250X product page, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html "
        "(not opened); rates per unit and clock from " + _ROCM + "mi250.html, the matrix rows, times 220 units",
        devices=2,
    ),
    _chip(
        "mi300x", "Instinct MI300X", "amd", "gfx942",
        {"float32": 163.4, "tfloat32": 653.7, "float16": 1307.4, "bfloat16": 1307.4, "fp8": 2614.9}, 192, 5300,
        _ROCM + "mi300.html, the matrix rows; memory from AMD's product page, "
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (not opened)",
    ),
)
# fmt: on

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ROWS})

# Same name, other clocks or other memory than the row of the table.
_OTHER_FORMS = {"pcie", "nvl", "mig", "40gb", "32gb", "lite"}


# What people call chips beside their names and titles, words only.
_NICKNAMES = {
    "trillium": "v6e",
    "ironwood": "v7x",
    "tpu7x": "v7x",
    "v5 lite": "v5e",
    "v5lite": "v5e",
    "v5litepod": "v5e",
}
# Words of a name that change no figure.
_PLAIN_WORDS = {"google", "cloud", "tpu", "nvidia", "tesla", "amd", "instinct", "gpu", "hbm2", "hbm2e", "hbm3", "hbm3e"}


def chip_name(text: str) -> str | None:
    """Reads a chip's name as people and runtimes write it.

    Args:
        text: Such as "H100", "NVIDIA H100 80GB HBM3", "a100-80gb", "TPU v5e" or "TPU v5 lite".

    Returns:
        The key in `CHIPS`, or None where no chip is called so, or the text names a form with other figures (a PCIe
        card, a 40 GB A100).
    """
    words = _words(text)
    joined = " ".join(words)
    plain = " ".join(word for word in words if word not in _PLAIN_WORDS)
    if plain in _NICKNAMES:
        return _NICKNAMES[plain]
    for chip in CHIPS.values():
        names = " ".join([chip.name, chip.title, *chip.device_kinds, f"{chip.memory_bytes // GIB}gb"])
        told = {*_words(names), *_PLAIN_WORDS}
        own = chip.name in words or joined in chip.device_kinds or joined == " ".join(_words(chip.title))
        if own and told.issuperset(words):
            return chip.name
    return None


def _words(text: str) -> list[str]:
    # "TPUv5e" is two words; "TPU7x" is a chip's name.
    return re.findall(r"[a-z0-9]+", re.sub(r"tpu(?=v\d)", "tpu ", text.lower()))


def find_chip(name: str) -> Chip:
    """Looks a chip up by its name.

    Args:
        name: A key of `CHIPS`, such as "h100", or another spelling that `chip_name` reads.

    Returns:
        The chip.

    Raises:
        ValueError: If there is no such chip; the message lists those there are, and the nearest.
    """
    known = chip_name(str(name))
    if known is None:
        raise ValueError(f"name={name!r} is not a known chip.{nearest_hint(name, CHIPS)} Known: {', '.join(CHIPS)}.")
    return CHIPS[known]


def nearest_hint(text: str, names: Iterable[str]) -> str:
    """The question whether a name was meant that a text, or a word of it, comes near to; "" where none is near."""
    names = list(names)
    wanted = [str(text).lower(), *_words(str(text))]
    near = list(dict.fromkeys(name for word in wanted for name in difflib.get_close_matches(word, names, n=1)))
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def identify_chip(device_name: str) -> Chip | None:
    """Finds the chip behind the name that a runtime gives a device.

    Args:
        device_name: Such as "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X" or "TPU v5 lite".

    Returns:
        The chip, or None where the name is not in the table or is of a form with other figures (a PCIe card, a
        40 GB A100, a slice of a GPU).
    """
    lowered = device_name.lower().strip()
    for chip in CHIPS.values():
        if lowered in chip.device_kinds:
            return chip
    words = set(re.findall(r"[a-z0-9]+", lowered))
    if words & _OTHER_FORMS:
        return None
    vendor_words = {"google": {"tpu"}, "nvidia": {"nvidia", "tesla"}, "amd": {"amd", "instinct"}}
    for chip in CHIPS.values():
        if chip.name in words and words & vendor_words[chip.vendor]:
            return chip
    return None
