"""What kernels reach of a chip's peak rates, by the generation of the chip.

The constants are fitted by `benchmarks/fit_efficiency.py` to published measurements of matrix products and of memory
bandwidth, which are listed with their sources in `benchmarks/efficiency_tables.json`. No training step is among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from keras_mp.precision.chips import Chip


class Efficiency(NamedTuple):
    """What kernels reach.

    Args:
        products: of the peak of large products, by the bits of an operand; of others, as with 16 bits.
        product_stream: of the memory's bandwidth in products that it limits.
        product_start: seconds that the smallest product takes.
        stream: of the memory's bandwidth in all other kernels.
        start: seconds that the smallest of them takes.
    """

    products: Mapping[int, float]
    product_stream: float
    product_start: float
    stream: float
    start: float


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        "7.0": Efficiency({16: 0.827, 32: 0.862}, 0.921, 1.55e-05, 0.912, 5.02e-06),
        "7.5": Efficiency({16: 0.669, 32: 0.515}, 0.994, 2.29e-05, 0.763, 5.02e-06),
        "8": Efficiency({16: 0.882}, 0.921, 1.55e-05, 0.819, 5.02e-06),
        "9": Efficiency({8: 0.743, 16: 0.762}, 0.921, 1.55e-05, 0.857, 5.02e-06),
        "10": Efficiency({8: 0.729, 16: 0.737}, 0.921, 1.55e-05, 0.912, 5.02e-06),
        "v7x": Efficiency({16: 0.836}, 0.435, 1.57e-06, 0.857, 1.57e-06),
        "v6e": Efficiency({16: 0.997}, 0.435, 1.57e-06, 0.857, 1.57e-06),
    }
)


def generation_of(chip: Chip) -> str:
    """The key in `EFFICIENCIES`; a generation without a table of its own takes the nearest's."""
    if chip.vendor == "google":
        return "v7x" if chip.name == "v7x" else "v6e"
    major, _, minor = chip.architecture.partition(".")
    if major == "7":
        return f"7.{minor}"
    return {"8": "8", "9": "9"}.get(major, "10")


def product_seconds(flops: float, moved: float, peak: float, bits: int, chip: Chip, of: Efficiency) -> float:
    """What a matrix product or convolution takes.

    Args:
        flops: its floating-point operations.
        moved: the bytes that it reads and writes.
        peak: of the chip for these operands, in operations per second.
        bits: of an operand.
        chip: the chip; a device has its share of the rates.
        of: what kernels reach of them.
    """
    computing = flops / (peak / chip.devices * of.products.get(bits, of.products[16]))
    moving = moved / (chip.bandwidth / chip.devices * of.product_stream)
    # Between the two limits, a product takes longer than either alone: the tables follow a sum of squares.
    return of.product_start + (computing**2 + moving**2) ** 0.5


def transfer_seconds(moved: float, chip: Chip, of: Efficiency) -> float:
    """What any other kernel takes, by the bytes that it reads and writes."""
    return of.start + moved / (chip.bandwidth / chip.devices * of.stream)
