"""One accelerator as data: rates, memory, links, compiler's description."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

TERA = 1e12
GIGA = 1e9
# Vendors write GB for the memory of an accelerator and mean 2**30 bytes: an "80 GB" H100 reports 84.9e9 bytes.
GIB = 2**30
# Of one link in one direction, in GB/s: half of NVIDIA's figures, which add both directions up.
_NVLINK = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
# Transfers per second and lane, in billions, of one bit each.
_PCIE = {3: 8, 4: 16, 5: 32}
_NVLINK_SOURCE = (
    "NVIDIA's table of NVLink generations, https://www.nvidia.com/en-us/data-center/nvlink/ (not opened; its totals "
    "copied at https://juejin.cn/post/7232679817128132665, and links times rate at "
    "https://alpha-one-index.github.io/ai-infra-index/specs/networking-interconnects.html)"
)
_PCIE_SOURCE = "PCI Express {}.0: {} GT/s a lane, of which 128 of 130 bits are data, {} lanes"


@dataclass(frozen=True)
class Link:
    """A chip's links to others of its slice or host."""

    name: str  # such as "ICI", "NVLink 4" or "PCIe 4.0 x16"
    bandwidth: float  # bytes a second that the chip sends over all of them together; as much comes in meanwhile
    source: str


def ici(bidirectional: float, source: str) -> Link:
    """A TPU's interconnect, whose GB/s count both directions."""
    return Link("ICI", bidirectional / 2 * GIGA, source)


def nvlink(generation: int, links: int) -> Link:
    """NVLink of a generation, all links within the host."""
    return Link(f"NVLink {generation}", links * _NVLINK[generation] * GIGA, _NVLINK_SOURCE)


def pcie(generation: int, source: str, lanes: int = 16) -> Link:
    """PCI Express, for GPUs with no NVLink."""
    rate = _PCIE[generation]
    source = _PCIE_SOURCE.format(generation, rate, lanes) + f"; {source}"
    return Link(f"PCIe {generation}.0 x{lanes}", lanes * rate * 128 / 130 / 8 * GIGA, source)


@dataclass(frozen=True)
class GpuDescription:
    """What XLA's compiler needs of a GPU not attached.

    Sources: the target descriptions in XLA's repository (xla/backends/gpu/target_config/specs, as of 2026) where there
    is one (A100, H100, H200, B200, B300, RTX A6000), otherwise the output of deviceQuery on the GPU where a copy of it
    was found; each row of the table says which.
    """

    device_name: str  # as the driver reports it, without "NVIDIA"
    cores: int  # multiprocessors
    lanes: int  # float32 lanes of a multiprocessor
    threads: int  # the most that a multiprocessor holds
    shared_per_core: int  # memory of a multiprocessor, in bytes
    shared_per_block: int  # the most that a block may ask for, in bytes
    l2: int  # bytes
    clock: float  # GHz
    memory: int  # bytes that the driver reports
    bandwidth: int  # bytes a second


@dataclass(frozen=True)
class TpuSlices:
    """Names in libtpu of slices of a TPU not attached."""

    family: str  # libtpu's name of the chip, such as "tpu7x"
    dimensions: int  # in which its chips are wired: 2 or 3


@dataclass(frozen=True)
class Chip:
    """One accelerator as it is sold, chip or module."""

    name: str  # the key in `CHIPS`, such as "h100"
    title: str  # the name people use, with the form that the figures are for
    vendor: str  # "nvidia", "google" or "amd"
    architecture: str  # compute capability ("9.0"), TPU generation ("v5e") or LLVM target ("gfx942")
    # Dense operations a second (a multiply-add is two) by operand dtype: "float32", "tfloat32", "float16", "bfloat16",
    # "fp8", "fp4", "int8". Of products that accumulate in float32: GeForce cards halve the rate there. A missing key
    # means that the chip has no hardware for it.
    peak: Mapping[str, float]
    memory_bytes: int  # by the data sheet
    bandwidth: float  # of its memory, in bytes a second
    source: str  # the document that each figure is from
    devices: int = 1  # that the runtime makes of one chip; a device then has that share of every figure
    compiler: GpuDescription | TpuSlices | None = None  # None where no compiler that can be installed takes the chip
    # Names that a runtime gives the chip and that do not hold `name`, in lower case; of TPUs those of
    # jax/_src/pallas/mosaic/tpu_info.py in JAX 0.10.
    device_kinds: tuple[str, ...] = ()
    # To other chips; None where not known. A GH200 that stands alone has none: its NVLink reaches others in a DGX GH200
    # only. For TPU v2 and v3 and AMD's GPUs no compiler is there, so that no collective is timed.
    link: Link | None = None

    @property
    def host_link(self) -> Link | None:
        """PCI Express from one of its devices to the host.

        Of a GPU without NVLink that is `link`; of one with NVLink 16 lanes of the generation that its
        architecture brought: 3 for P100 and V100, 4 for A100, 5 from H100 on (NVIDIA's data sheets, not opened; GPUMAP
        in the table). A GH200 has NVLink-C2C instead, and None. Of TPUs about 15 GB/s a chip (the "How to Scale Your
        Model" book, chapter 2, exercise 3), which is what 16 lanes of generation 3 carry.
        """
        if self.link is not None and self.link.name.startswith("PCIe"):
            return self.link
        if self.vendor == "google":
            return Link("PCIe", 15 * GIGA / self.devices, "https://jax-ml.github.io/scaling-book/tpus, exercise 3")
        if self.vendor != "nvidia" or self.name.startswith(("gh", "gb")):
            return None
        generation = 3 if self.architecture < "8" else 4 if self.architecture < "9" else 5
        return pcie(generation, "the generation of its architecture")

    @property
    def device_bytes(self) -> int:
        """Bytes of one device's memory, as a program finds them."""
        # What a GPU's driver reports is, with error correction, up to 8% less than the data sheet says.
        sheet = self.memory_bytes // self.devices
        return min(sheet, self.compiler.memory) if isinstance(self.compiler, GpuDescription) else sheet


# Float32 lanes, most threads, shared memory, and most shared memory of a block, by compute capability. Sources: the
# same target descriptions for 8.0, 8.6, 9.0, 10.0 and 10.3; for all of them cuda::arch_traits in NVIDIA's CCCL
# (libcudacxx/include/cuda/__device/arch_traits.h), and for lanes deviceQuery's "CUDA Cores/MP".
_MULTIPROCESSORS = {
    "7.5": (64, 1024, 65536, 65536),
    "8.0": (64, 2048, 167936, 166912),
    "8.6": (128, 1536, 102400, 101376),
    "8.9": (128, 1536, 102400, 101376),
    "9.0": (128, 2048, 233472, 232448),
    "10.0": (128, 2048, 233472, 232448),
    "10.3": (128, 2048, 233472, 232448),
    "12.0": (128, 1536, 102400, 101376),
}


def gpu(
    capability: str, device_name: str, cores: int, l2: int, clock: float, memory: int, bandwidth: float
) -> GpuDescription:
    """Builds a GPU's description; bandwidth in GB/s."""
    multiprocessor = _MULTIPROCESSORS[capability]
    return GpuDescription(device_name, cores, *multiprocessor, l2, clock, memory, round(bandwidth * GIGA))


def chip(
    name: str,
    title: str,
    vendor: str,
    architecture: str,
    peak: dict[str, float],
    memory: int,
    bandwidth: float,
    source: str,
    **others: Any,
) -> Chip:
    """Builds a row in data sheets' units: teraflops, GiB, GB/s."""
    rates = MappingProxyType({dtype: teraflops * TERA for dtype, teraflops in peak.items()})
    return Chip(name, title, vendor, architecture, rates, memory * GIB, bandwidth * GIGA, source, **others)
