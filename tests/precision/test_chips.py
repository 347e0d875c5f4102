"""The table is held against figures that it does not contain: units and clocks, buses, pods."""

import itertools

import pytest

from keras_mp.precision.chips import CHIPS, find_chip, identify_chip, parse_target

# NVIDIA: streaming multiprocessors and boost clocks of the architecture white papers. AMD: compute units and
# FLOPS/clock/unit of the ROCm documentation. Of each: the units; the clock in Hz and the dense operations per unit and
# clock for float16 or bfloat16, and for float32, whose clock may be another; the bits of the memory bus and gigabits a
# second and pin; the memory packages and GiB in each, of which the vendor leaves a little of a B200, H200 and H100 out.
GPUS = {
    "p100": (56, None, (1.48e9, 128), (4096, 1.43), (4, 4)),
    "v100": (80, (1.53e9, 1024), (1.53e9, 128), (4096, 1.75), (4, 4)),
    "t4": (40, (1.59e9, 1024), (1.59e9, 128), (256, 10.0), (8, 2)),
    "a100": (108, (1.41e9, 2048), (1.41e9, 128), (5120, 3.186), (5, 16)),
    "l4": (58, (2.04e9, 1024), (2.04e9, 256), (192, 12.5), (12, 2)),
    "h100": (132, (1.83e9, 4096), (1.98e9, 256), (5120, 5.23), (5, 16)),
    "h200": (132, (1.83e9, 4096), (1.98e9, 256), (6144, 6.25), (6, 24)),
    "b200": (148, (1.86e9, 8192), (1.965e9, 256), (8192, 7.5), (8, 24)),
    "mi100": (120, (1.502e9, 1024), (1.502e9, 256), (4096, 2.4), (4, 8)),
    "mi250x": (220, (1.7e9, 1024), (1.7e9, 256), (8192, 3.2), (8, 16)),
    "mi300x": (304, (2.1e9, 2048), (2.1e9, 256), (8192, 5.2), (8, 24)),
    "a10": (72, (1.695e9, 1024), (1.695e9, 256), (384, 12.5), (12, 2)),
    "a40": (84, (1.74e9, 1024), (1.74e9, 256), (384, 14.5), (24, 2)),
    "a100-40gb": (108, (1.41e9, 2048), (1.41e9, 128), (5120, 2.43), (5, 8)),
    "a100-40gb-pcie": (108, (1.41e9, 2048), (1.41e9, 128), (5120, 2.43), (5, 8)),
    "l40s": (142, (2.52e9, 1024), (2.52e9, 256), (384, 18.0), (24, 2)),
    "h100-pcie": (114, (1.62e9, 4096), (1.755e9, 256), (5120, 3.186), (5, 16)),
    "h100-nvl": (132, (1.545e9, 4096), (1.785e9, 256), (6016, 5.237), (6, 16)),
    "gh200": (132, (1.83e9, 4096), (1.98e9, 256), (6144, 5.238), (6, 16)),
    "b300": (148, (1.86e9, 8192), (2.032e9, 256), (7680, 7.992), (8, 36)),
    "rtx2080ti": (68, (1.545e9, 512), (1.545e9, 128), (352, 14.0), (11, 1)),
    "rtx3060": (28, (1.777e9, 512), (1.777e9, 256), (192, 15.0), (6, 2)),
    "rtx3090": (82, (1.695e9, 512), (1.695e9, 256), (384, 19.5), (24, 1)),
    "rtx4060ti": (34, (2.535e9, 512), (2.535e9, 256), (128, 18.0), (4, 2)),
    "rtx4060ti-16gb": (34, (2.535e9, 512), (2.535e9, 256), (128, 18.0), (8, 2)),
    "rtx4070": (46, (2.475e9, 512), (2.475e9, 256), (192, 21.0), (6, 2)),
    "rtx4090": (128, (2.52e9, 512), (2.52e9, 256), (384, 21.0), (12, 2)),
    "rtx5070ti": (70, (2.452e9, 512), (2.452e9, 256), (256, 28.0), (8, 2)),
    "rtx5090": (170, (2.407e9, 512), (2.407e9, 256), (512, 28.0), (16, 2)),
    "rtxa6000": (84, (1.8e9, 1024), (1.8e9, 256), (384, 16.0), (24, 2)),
    "rtx6000ada": (142, (2.505e9, 1024), (2.505e9, 256), (384, 20.0), (24, 2)),
}
# Google: matrix units of 128 x 128 multiply-adds, clocks of "TPU v4: An Optically Reconfigurable Supercomputer" and of
# JAX's table of TPUs.
TPU_UNITS = {
    "v2": (2, 0.7e9, 2 * 128 * 128),
    "v3": (4, 0.94e9, 2 * 128 * 128),
    "v4": (8, 1.05e9, 2 * 128 * 128),
    "v5e": (4, 1.5e9, 2 * 128 * 128),
    "v5p": (8, 1.75e9, 2 * 128 * 128),
}
SIXTEEN_BIT = TPU_UNITS | {name: (units, *rate) for name, (units, rate, *_) in GPUS.items() if rate}
FLOAT32 = {name: (units, *rate) for name, (units, _, rate, *_) in GPUS.items()}
MEMORY_BUS, PACKAGES = ({name: row[place] for name, row in GPUS.items()} for place in (3, 4))
# NVIDIA's table of a B300 gives the B200's rates; its clock is 3% higher.
RATES_DIFFER = {"b300": 0.03}
COARSE = ("h100", "b200")  # pins' rates known to three digits
# Bytes and bytes per second of a chip in JAX 0.10, jax/_src/pallas/mosaic/tpu_info.py, which has neither from Google
# Cloud's pages. It counts a v2's 16 GB in powers of ten.
JAX_TPU = {
    "v2": (16.0e9, 7.16e11),
    "v3": (34.4e9, 8.25e11),
    "v4": (34.4e9, 1.23e12),
    "v5e": (17.2e9, 8.20e11),
    "v5p": (103e9, 2.46e12),
    "v6e": (34.4e9, 1.64e12),
    "v7x": (206e9, 7.40e12),
}
# Where JAX and Google differ by more than rounding, in bandwidth.
JAX_DIFFERS = {"v3": 0.10, "v5p": 0.13}
# Chips and operations per second of a whole pod, from Google's pages; FP8 for v7x, bfloat16 for the others.
PODS = {
    "v3": (1024, 126e15),
    "v4": (4096, 1.1e18),
    "v5e": (256, 50.63e15),
    "v6e": (256, 234.9e15),
    "v7x": (9216, 42.5e18),
}
FIGURES = {"rate": (SIXTEEN_BIT, FLOAT32, PODS), "bandwidth": (MEMORY_BUS, JAX_TPU), "memory": (PACKAGES, JAX_TPU)}

GENERATIONS = (("v2", "v3", "v4", "v5p", "v7x"), ("v5e", "v6e"), ("p100", "v100", "a100", "h100", "b200"),
               ("t4", "l4", "l40s"), ("mi100", "mi250x", "mi300x"), ("rtx2080ti", "rtx3090", "rtx4090", "rtx5090"),
               ("rtx3060", "rtx4070", "rtx5070ti"), ("rtxa6000", "rtx6000ada"), ("a10", "a40", "l40s"))  # fmt: skip


def test_16_bit_peak_is_units_times_width_times_clock():
    for name, (units, clock, width) in SIXTEEN_BIT.items():
        peak, expected = CHIPS[name].peak, pytest.approx(units * clock * width, rel=RATES_DIFFER.get(name, 0.02))
        assert peak.get("float16", peak.get("bfloat16")) == expected, name
        times = 0.5 if name == "mi100" else 1  # AMD gives it half the rate in bfloat16
        assert peak.get("bfloat16") in (None, times * peak.get("float16", peak.get("bfloat16"))), name


def test_float32_peak_is_units_times_width_times_clock():
    for name, (units, clock, width) in FLOAT32.items():
        expected = pytest.approx(units * clock * width, rel=RATES_DIFFER.get(name, 0.02))
        assert CHIPS[name].peak["float32"] == expected, name


def test_the_compiler_is_told_the_units_clock_and_bandwidth_of_the_chip():
    for name, chip in CHIPS.items():
        if chip.compiler is None or name not in FLOAT32:  # TPUs
            continue
        units, clock, _ = FLOAT32[name]
        assert chip.compiler.cores == units, name
        assert chip.compiler.clock * 1e9 == pytest.approx(clock, rel=RATES_DIFFER.get(name, 0.01)), name
        assert chip.compiler.bandwidth == pytest.approx(chip.bandwidth, rel=0.01), name
        bits, gigabits = MEMORY_BUS[name]
        rounded = 0.002 if name in COARSE else 0.0004  # the figures of data sheets are rounded more
        assert chip.compiler.bandwidth == pytest.approx(bits / 8 * gigabits * 1e9, rel=rounded), name
        assert chip.device_bytes % 4096 == 0, f"{name}: no whole pages of memory"


def test_bandwidth_is_bus_width_times_pin_rate():
    for name, (bits, gigabits) in MEMORY_BUS.items():
        assert CHIPS[name].bandwidth == pytest.approx(bits / 8 * gigabits * 1e9, rel=0.02), name


def test_memory_is_packages_times_their_size():
    for name, (packages, gib) in PACKAGES.items():
        assert 0.93 <= CHIPS[name].memory_bytes / (packages * gib * 2**30) <= 1, name


def test_tpu_memory_agrees_with_jax():
    for name, (memory, bandwidth) in JAX_TPU.items():
        assert CHIPS[name].memory_bytes == pytest.approx(memory, rel=0.08 if name == "v2" else 0.02), name
        assert CHIPS[name].bandwidth == pytest.approx(bandwidth, rel=JAX_DIFFERS.get(name, 0.03)), name


def test_tpu_peak_is_its_share_of_the_pod():
    for name, (chips, total) in PODS.items():
        peak = CHIPS[name].peak
        # Google rounds the figures of pods to two digits or more.
        assert peak.get("fp8", peak["bfloat16"]) == pytest.approx(total / chips, rel=0.03), name


def test_each_halving_of_the_operand_doubles_the_rate():
    for name, chip in CHIPS.items():
        peak = chip.peak
        if "fp8" in peak:
            assert peak["fp8"] == pytest.approx(2 * peak["bfloat16"], rel=0.01), name
        if "int8" in peak:
            assert peak["int8"] == pytest.approx(2 * peak.get("bfloat16", peak.get("float16")), rel=0.01), name
        if "tfloat32" in peak:
            # 2%: NVIDIA rounds 1.125 petaflops of the B200 to 1.1, and the 60.6 of the L4 to 60.
            assert peak["bfloat16"] == pytest.approx(2 * peak["tfloat32"], rel=0.025), name
        if chip.vendor == "amd":
            # CDNA1 multiplied bfloat16 at half the float16 rate.
            assert peak["float16"] == (2 if name == "mi100" else 1) * peak["bfloat16"], name
        if name == "p100":
            assert peak["float16"] == 2 * peak["float32"]
        if chip.title.startswith("GeForce"):
            faster = 4 if chip.architecture == "7.5" else 2
            assert peak["float16"] == pytest.approx(faster * peak["float32"], rel=0.01), name
        elif "float32" in peak and "tfloat32" in peak:
            assert peak["tfloat32"] > 1.5 * peak["float32"], name


def test_a_later_generation_is_faster_and_no_smaller():
    for older, newer in (pair for names in GENERATIONS for pair in itertools.pairwise(names)):
        older, newer = CHIPS[older], CHIPS[newer]
        for dtype in older.peak.keys() & newer.peak.keys():
            assert newer.peak[dtype] > older.peak[dtype], (newer.name, dtype)
        if newer.name != "l4":  # A quarter fewer bits on its memory bus than the T4.
            assert newer.bandwidth > older.bandwidth, newer.name
        assert newer.memory_bytes >= older.memory_bytes, newer.name


def test_a_row_is_complete_and_held_against_figures_from_elsewhere():
    for name, chip in CHIPS.items():
        assert chip.vendor in ("google", "nvidia", "amd"), name
        assert "https://" in chip.source, name
        assert set(chip.peak) <= {"float32", "tfloat32", "float16", "bfloat16", "fp8", "fp4", "int8"}, name
        # From the 16 GiB of a P100 to the 192 of an MI300X, reached in 10 to 60 ms: the ratio is alike everywhere.
        assert 0.01 < chip.memory_bytes / chip.bandwidth < 0.09, name
        without = [figure for figure, tables in FIGURES.items() if not any(name in table for table in tables)]
        assert without == [], f"the tables at the top of this file need a source of their own for {name}"


def test_a_program_has_the_memory_that_the_driver_reports():
    assert 84_942_979_072 == pytest.approx(CHIPS["h100"].memory_bytes, rel=0.015)  # within its reserve
    assert CHIPS["t4"].device_bytes == 15_828_320_256 < CHIPS["t4"].memory_bytes
    assert CHIPS["rtx4070"].device_bytes == CHIPS["rtx4070"].memory_bytes  # no report of it was found
    assert CHIPS["v5e"].device_bytes == CHIPS["v5e"].memory_bytes
    assert CHIPS["v7x"].device_bytes * 2 == CHIPS["v7x"].memory_bytes
    for chip in CHIPS.values():
        assert 0.9 * chip.memory_bytes < chip.device_bytes * chip.devices <= chip.memory_bytes


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        CHIPS["h100"].peak["fp8"] = 1.0


def test_find_chip():
    assert find_chip("H100") is CHIPS["h100"]
    with pytest.raises(ValueError, match=r"name='h10' is not a known chip\. Did you mean 'h100'\? Known: v2, .*mi300x"):
        find_chip("h10")
    with pytest.raises(ValueError, match="Known: v2"):
        find_chip("toaster")


IDENTIFIED = [
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA A10", "a10"),
    ("NVIDIA A40", "a40"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
    ("GeForce RTX 2080 Ti", "rtx2080ti"),
    ("NVIDIA GeForce RTX 3060", "rtx3060"),
    ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
    ("NVIDIA RTX A6000", "rtxa6000"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
    ("NVIDIA L4", "l4"),
    ("Tesla T4", "t4"),
    ("Tesla V100-SXM2-16GB", "v100"),
    ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct MI250X / MI250", "mi250x"),
    ("TPU v2", "v2"),
    ("TPU v4", "v4"),
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v5p", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("TPU7x", "v7x"),
]


def test_identify_chip():
    for device_name, name in IDENTIFIED:
        assert identify_chip(device_name) is CHIPS[name], device_name


UNKNOWN = [
    "NVIDIA L40",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA A10-24Q",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA GeForce RTX 3060 Ti",
    "NVIDIA GeForce RTX 3060 Laptop GPU",
    "NVIDIA GeForce RTX 4070 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 2080 Ti with Max-Q Design",
    "NVIDIA RTX 6000 Ada Generation Laptop GPU",
    "TPU v4 lite",
    "V4 engine",
    "",
]


def test_identify_chip_does_not_guess():
    assert [name for name in UNKNOWN if identify_chip(name) is not None] == []


WRITTEN = [
    ("H100 SXM5", "h100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("a100-80gb", "a100"),
    ("A100 80GB SXM", "a100"),
    ("A100 40GB", "a100-40gb"),
    ("h100 nvl", "h100-nvl"),
    *((text, "rtx4090") for text in ("RTX 4090", "rtx4090", "GeForce RTX 4090", "rtx-4090", "4090")),
    ("4060 Ti 16GB", "rtx4060ti-16gb"),
    ("RTX 4060Ti 16 GB", "rtx4060ti-16gb"),
    ("2080ti", "rtx2080ti"),
    ("RTX 6000 Ada", "rtx6000ada"),
    ("tpu v5e", "v5e"),
    ("TPUv5e", "v5e"),
    ("TPU v5 lite", "v5e"),
    ("v5litepod", "v5e"),
    ("TPU v6e (Trillium)", "v6e"),
    ("Trillium", "v6e"),
    ("TPU7x (Ironwood)", "v7x"),
    ("AMD Instinct MI300X", "mi300x"),
    *((chip.title, chip.name) for chip in CHIPS.values()),
]


def test_chips_are_found_by_the_names_people_and_runtimes_write():
    for text, name in WRITTEN:
        assert find_chip(text) is CHIPS[name], text


def test_a_form_with_other_figures_is_not_taken_for_the_chip():
    for text in ("A100 80GB PCIe", "V100 32GB", "RTX 4080", "4090 laptop", "RTX 3060 8GB", "rtx", "h100 a100", ""):
        with pytest.raises(ValueError, match="is not a known chip"):
            find_chip(text)


def test_the_nearest_names_are_told():
    for text, name in (("V100 32GB", "v100"), ("RTX 4080", "rtx4090"), ("4070 super", "rtx4070"), ("L40", "l40s")):
        with pytest.raises(ValueError, match=f"{text!r} is not a known chip. Did you mean '{name}'"):
            find_chip(text)


COUNTED = [
    ("h100", "h100", 1),
    ("H100 SXM", "h100", 1),
    ("H100 x 8", "h100", 8),
    ("8x H100", "h100", 8),
    ("4 x Tesla T4", "t4", 4),
    ("v5litepod-8", "v5e", 8),
    ("TPU v5e-16", "v5e", 16),
    ("v5e-2x4", "v5e", 8),
    ("v5p-2x2x4", "v5p", 16),
    # Google counts TensorCores here, two a chip.
    ("v4-8", "v4", 4),
    ("v3-8", "v3", 4),
    ("v2-8", "v2", 4),
    ("4x TPU v4", "v4", 4),
    ("v5p-32", "v5p", 16),
    ("h100-80gb", "h100", 1),
    ("4x RTX 4090", "rtx4090", 4),
    ("4x4090", "rtx4090", 4),
    ("RTX 4060 Ti 16GB x2", "rtx4060ti-16gb", 2),
    ("tpu7x-8", "v7x", 4),
]


def test_a_chip_and_how_many_of_it_as_people_write_them():
    for text, name, count in COUNTED:
        assert parse_target(text) == (CHIPS[name], count), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10x8", "target='h10x8' is not a known chip. Did you mean 'h100'"),
        ("h100-8", "'h100-8' is not a known chip. Did you mean 'h100'"),
        ("toaster", "target='toaster' is not a known chip. Known: v2"),
        ("h100x0", "target='h100x0' names 0 H100 SXM5 chips: the least is 1"),
        ("v4-3", "target='v4-3' names 1.5 TPU v4 chips: a name ends in a multiple of 2, its TensorCores"),
    ],
)
def test_what_is_no_chip_or_no_number_of_them_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse_target(text)
