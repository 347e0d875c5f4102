"""Rates of links against figures that the table does not contain: ports and their rate, or another edition's unit."""

import pytest

from keras_mp.precision.chip import pcie
from keras_mp.precision.chips import CHIPS

# Ports of a TPU and gigabits per second of each in one direction: the "ICI ports per chip" of Google's newer
# pages, and the gigabits of all ports together on its older ones (1600 for v5e, 4800 for v5p), which are rounded down.
PORTS = {"v4": (6, 400), "v5e": (4, 400), "v5p": (6, 800), "v6e": (4, 800)}


def test_a_chip_sends_over_all_of_its_ports():
    for name, (ports, gigabits) in PORTS.items():
        assert CHIPS[name].link.bandwidth == ports * gigabits * 1e9 / 8, name


def test_every_tpu_that_can_be_compiled_for_has_a_rate_and_its_source():
    for chip in CHIPS.values():
        if chip.vendor == "google" and chip.compiler is not None:
            assert chip.link.name == "ICI" and chip.link.source.startswith(("Google", "6 links"))


def test_every_gpu_that_can_be_compiled_for_has_links_but_a_superchip():
    without = {chip.name for chip in CHIPS.values() if chip.vendor == "nvidia" and chip.link is None}
    assert without == {"gh200"}  # one to a host
    for chip in CHIPS.values():
        if chip.link is not None and chip.link.name.startswith("PCIe"):
            assert chip.link.source.split("; ")[-1], chip.name


def test_rates_of_nvlink_and_pci_express():
    # NVIDIA's totals add both directions up.
    totals = {"p100": 160, "v100": 300, "a100": 600, "h100": 900, "b200": 1800}
    assert {name: 2 * CHIPS[name].link.bandwidth / 1e9 for name in totals} == totals
    assert {chip.link.name[-3:] for chip in CHIPS.values() if chip.link and "PCIe" in chip.link.name} == {" x8", "x16"}
    # 985 MB/s is what a lane of PCI Express 3.0 is said to carry; each generation doubles it.
    for generation, factor in ((3, 1), (4, 2), (5, 4)):
        assert pcie(generation, "").bandwidth == pytest.approx(16 * factor * 0.985e9, rel=0.001)
    assert pcie(4, "", lanes=8).name == "PCIe 4.0 x8"
