"""NVIDIA's GPUs for desktop machines: GeForce, and RTX for workstations. Their rates are those of products that
accumulate in float32, which GeForce cards run at half the rate of those that accumulate in float16, FP8 included."""

from keras_mp.precision.chip import GIB, chip, gpu
from keras_mp.precision.link import pcie
from keras_mp.precision.nvidia_sources import DEVICE_QUERY, GPUMAP, NANOCHAT, NO_DEVICE_QUERY, WHITE_PAPER

_UNITS = "; the rates are multiprocessors x clock x the width that the multiprocessors of this generation share"
# Eight lanes, 15.754 GB/s.
_AD106 = (
    "https://hardwareluxx.de/index.php/artikel/hardware/grafikkarten/61026-geforce-rtx-4060-ti-mit-8-gb-im-test.html"
)

# fmt: off
NVIDIA_DESKTOP_GPUS = (
    chip(
        "rtx2080ti", "GeForce RTX 2080 Ti", "nvidia", "7.5", {"float32": 13.4, "float16": 53.8}, 11, 616,
        WHITE_PAPER % "Turing architecture" + ", https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/"
        "technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf, its table as public text quotes "
        "it, the reference card and not the Founders Edition" + DEVICE_QUERY,
        compiler=gpu("7.5", "GeForce RTX 2080 Ti", 68, 5767168, 1.545, 11523260416, 616),
        link=pcie(3, "as other cards of its generation: https://pcpartcomparison.com/gpu/tesla-t4-vs-l4"),
    ),
    chip(
        "rtx3060", "GeForce RTX 3060 12GB", "nvidia", "8.6",
        {"float32": 12.7, "tfloat32": 12.7, "float16": 25.5, "bfloat16": 25.5}, 12, 360,
        "https://techtaks.com/geforce-rtx-3060-nvidia-finally-details-the-specifications/: 13 teraflops, and 101 for "
        "tensors with sparsity and float16 accumulation, a quarter of which counts here" + DEVICE_QUERY,
        compiler=gpu("8.6", "GeForce RTX 3060", 28, 2359296, 1.777, 12626493440, 360.048),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "rtx3090", "GeForce RTX 3090", "nvidia", "8.6",
        {"float32": 35.6, "tfloat32": 35.6, "float16": 71, "bfloat16": 71}, 24, 936,
        WHITE_PAPER % "Ampere GA102" + ", its table 9 as public text quotes it; " + NANOCHAT + DEVICE_QUERY,
        compiler=gpu("8.6", "GeForce RTX 3090", 82, 6291456, 1.695, 25443893248, 936.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "rtx4060ti", "GeForce RTX 4060 Ti 8GB", "nvidia", "8.9",
        {"float32": 22.1, "tfloat32": 22.1, "float16": 44.1, "bfloat16": 44.1, "fp8": 88.3}, 8, 288,
        "https://www.thefpsreview.com/?p=133840 for units, clock, L2, bandwidth and memory" + _UNITS + NO_DEVICE_QUERY,
        compiler=gpu("8.9", "GeForce RTX 4060 Ti", 34, 33554432, 2.535, 8 * GIB, 288),
        link=pcie(4, _AD106, lanes=8),
    ),
    chip(
        "rtx4060ti-16gb", "GeForce RTX 4060 Ti 16GB", "nvidia", "8.9",
        {"float32": 22.1, "tfloat32": 22.1, "float16": 44.1, "bfloat16": 44.1, "fp8": 88.3}, 16, 288,
        "https://www.thefpsreview.com/?p=133840 for units, clock, L2 and bandwidth" + _UNITS + DEVICE_QUERY,
        compiler=gpu("8.9", "GeForce RTX 4060 Ti", 34, 33554432, 2.535, 16722821120, 288),
        link=pcie(4, _AD106, lanes=8),
    ),
    chip(
        "rtx4070", "GeForce RTX 4070", "nvidia", "8.9",
        {"float32": 29.1, "tfloat32": 29.1, "float16": 58.3, "bfloat16": 58.3, "fp8": 116.6}, 12, 504,
        "https://www.thefpsreview.com/gpu-family/nvidia-geforce-rtx-4070-gpu-family-specifications for units, clock "
        "and memory, " + GPUMAP + " for the rates and L2; FP8 is half of the rate there, which accumulates in float16"
        + NO_DEVICE_QUERY,
        compiler=gpu("8.9", "GeForce RTX 4070", 46, 37748736, 2.475, 12 * GIB, 504.048),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "rtx4090", "GeForce RTX 4090", "nvidia", "8.9",
        {"float32": 82.6, "tfloat32": 82.6, "float16": 165.2, "bfloat16": 165.2, "fp8": 330.3}, 24, 1008,
        WHITE_PAPER % "Ada architecture, version 2.1" + ", appendix A as public text quotes it; " + NANOCHAT
        + DEVICE_QUERY,
        compiler=gpu("8.9", "GeForce RTX 4090", 128, 75497472, 2.52, 25250627584, 1008.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "rtx5070ti", "GeForce RTX 5070 Ti", "nvidia", "12.0",
        {"float32": 43.9, "tfloat32": 43.9, "float16": 87.9, "bfloat16": 87.9, "fp8": 175.8}, 16, 896,
        GPUMAP + ", the only source opened for L2; units, clock and bandwidth also from https://www.topcpu.net/fr/news/"
        "nvidia-rtx-50-series-specifications-revealed-rtx-5070-matches-4090-performance" + NO_DEVICE_QUERY,
        compiler=gpu("12.0", "GeForce RTX 5070 Ti", 70, 67108864, 2.452, 16 * GIB, 896),
        link=pcie(5, GPUMAP),
    ),
    chip(
        "rtx5090", "GeForce RTX 5090", "nvidia", "12.0",
        {"float32": 104.8, "tfloat32": 104.8, "float16": 209.5, "bfloat16": 209.5, "fp8": 419}, 32, 1792,
        WHITE_PAPER % "RTX Blackwell architecture" + "; figures from " + GPUMAP + "; " + NANOCHAT + DEVICE_QUERY,
        compiler=gpu("12.0", "GeForce RTX 5090", 170, 100663296, 2.407, 33668857856, 1792.128),
        link=pcie(5, GPUMAP),
    ),
    chip(
        "rtxa6000", "RTX A6000", "nvidia", "8.6",
        {"float32": 38.7, "tfloat32": 77.4, "float16": 154.8, "bfloat16": 154.8}, 48, 768,
        "NVIDIA RTX A6000 data sheet (not opened); figures from " + GPUMAP
        + "; memory, clock and L2 from XLA's a6000.txtpb",
        compiler=gpu("8.6", "RTX A6000", 84, 6291456, 1.8, 51041271808, 768.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "rtx6000ada", "RTX 6000 Ada Generation", "nvidia", "8.9",
        {"float32": 91.1, "tfloat32": 182.1, "float16": 364.2, "bfloat16": 364.2, "fp8": 728.5}, 48, 960,
        "NVIDIA RTX 6000 Ada data sheet (not opened); figures from " + GPUMAP
        + ", L2 from https://cputronic.com/de/gpu/nvidia-rtx-6000-ada-generation" + NO_DEVICE_QUERY,
        compiler=gpu("8.9", "RTX 6000 Ada Generation", 142, 100663296, 2.505, 48 * GIB, 960),
        link=pcie(4, GPUMAP),
    ),
)
# fmt: on
