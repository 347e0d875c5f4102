"""What kernels reach of a chip's peak rates, by the generation of the chip.

The constants are fitted by `benchmarks/fit_efficiency.py` to published measurements of matrix products, of convolutions
and of memory bandwidth, which are listed with their sources in `benchmarks/efficiency_tables.json`. No training step is
among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from keras_mp.precision.chips import Chip


class Efficiency(NamedTuple):
    """What kernels reach.

    Args:
        products: of the peak of large products, by the bits of an operand (32: TF32 where the chip has it); of others,
            as with 16 bits.
        product_stream: of the memory's bandwidth in products that it limits.
        product_start: seconds that the smallest product takes.
        stream: of the memory's bandwidth in all other kernels.
        start: seconds that the smallest of them takes.
        convolution: the rate of large convolutions, as a share of that of large products of the same operands. On
            NVIDIA's GPUs of those whose arrays have channels first; no table has channels last, which run as products.
    """

    products: Mapping[int, float]
    product_stream: float
    product_start: float
    stream: float
    start: float
    convolution: float


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        "7.0": Efficiency({16: 0.827, 32: 0.862}, 0.921, 1.55e-05, 0.912, 5.02e-06, 0.587),
        "7.5": Efficiency({16: 0.669, 32: 0.515}, 0.994, 2.29e-05, 0.763, 5.02e-06, 0.54),
        "8": Efficiency({16: 0.73, 32: 0.715}, 0.921, 1.41e-05, 0.819, 5.02e-06, 0.587),
        "9": Efficiency({8: 0.727, 16: 0.784, 32: 0.789}, 0.921, 8.26e-06, 0.857, 5.02e-06, 0.587),
        "10": Efficiency({8: 0.691, 16: 0.702}, 0.921, 3.26e-06, 0.912, 5.02e-06, 0.587),
        "v7x": Efficiency({16: 0.836}, 0.435, 1.57e-06, 0.857, 1.57e-06, 1.0),
        "v6e": Efficiency({16: 0.997}, 0.435, 1.57e-06, 0.857, 1.57e-06, 1.0),
    }
)

# How many of the cycles that libtpu estimates pass in a second: of v6e and v7x by the tables, of which libtpu compiled
# the products; of v5e, for which there is none, 197 TFLOP/s over 4 matrix units of 128 x 128.
CYCLES_A_SECOND: Mapping[str, float] = MappingProxyType({"v5e": 1.5e9, "v6e": 2.24e9, "v7x": 2.16e9})


def generation_of(chip: Chip) -> str:
    """The key in `EFFICIENCIES`; a generation without a table of its own takes the nearest's."""
    if chip.vendor == "google":
        return "v7x" if chip.name == "v7x" else "v6e"
    major, _, minor = chip.architecture.partition(".")
    if major == "7":
        return f"7.{minor}"
    return {"8": "8", "9": "9"}.get(major, "10")


def computing_seconds(flops: float, peak: float, bits: int, chip: Chip, of: Efficiency, kind: str = "dot") -> float:
    """What the operations of a large product or convolution take where nothing else limits it.

    Args:
        flops: its floating-point operations.
        peak: of the chip for these operands, in operations per second.
        bits: of an operand.
        chip: the chip; a device has its share of the rates.
        of: what kernels reach of them.
        kind: "dot" or "convolution".
    """
    share = of.products[bits if bits in of.products else 16] * (of.convolution if kind == "convolution" else 1)
    return flops / (peak / chip.devices * share)


def product_seconds(computing: float, moved: float, chip: Chip, of: Efficiency) -> float:
    """What a matrix product or convolution takes.

    Args:
        computing: the seconds that its operations take, from `computing_seconds`.
        moved: the bytes that it reads and writes.
        chip: the chip; a device has its share of the rates.
        of: what kernels reach of them.
    """
    moving = moved / (chip.bandwidth / chip.devices * of.product_stream)
    # Between the two limits, a product takes longer than either alone: the tables follow a sum of squares.
    return of.product_start + (computing**2 + moving**2) ** 0.5


def transfer_seconds(moved: float, chip: Chip, of: Efficiency) -> float:
    """What any other kernel takes, by the bytes that it reads and writes."""
    return of.start + moved / (chip.bandwidth / chip.devices * of.stream)
