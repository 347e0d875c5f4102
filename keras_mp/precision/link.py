"""What chips send to each other over, and how fast."""

from dataclasses import dataclass

_GIGA = 1e9
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
    """The links of one chip to other chips of its slice or host.

    Args:
        name: Such as "ICI", "NVLink 4" or "PCIe 4.0 x16".
        bandwidth: Bytes per second that the chip sends over all of its links together; as much comes in meanwhile.
        source: The document that the figure is from.
    """

    name: str
    bandwidth: float
    source: str


def ici(bidirectional: float, source: str) -> Link:
    """A TPU's interconnect, from the rate in GB/s that Google states, which adds both directions up."""
    return Link("ICI", bidirectional / 2 * _GIGA, source)


def nvlink(generation: int, links: int) -> Link:
    """NVLink of this generation and number of links, all of them to a switch or to other GPUs of the host."""
    return Link(f"NVLink {generation}", links * _NVLINK[generation] * _GIGA, _NVLINK_SOURCE)


def pcie(generation: int, source: str, lanes: int = 16) -> Link:
    """PCI Express, over which GPUs send that have no NVLink, or only a bridge between two of them.

    Args:
        generation: 3, 4 or 5.
        source: The document that names generation and lanes.
        lanes: 16, or 8.
    """
    rate = _PCIE[generation]
    source = _PCIE_SOURCE.format(generation, rate, lanes) + f"; {source}"
    return Link(f"PCIe {generation}.0 x{lanes}", lanes * rate * 128 / 130 / 8 * _GIGA, source)
