"""The chips: figures of data sheets, with sources."""

from keras_mp.precision.chip import GIB, TpuSlices, chip, gpu, ici, nvlink, pcie

# What stands behind the figures of NVIDIA's GPUs, in words that several rows share.
SPARSE = "; the tensor-core figures are half of the sparse ones printed there"
# NVIDIA's own pages could not be opened when this was written. What stands in for them is said in each row, and
# the tests compute every figure again from the number of units, their width and their clock.
NOT_OPENED = "; NVIDIA's page itself not opened, figures checked against "
DATA_SHEET = "NVIDIA %s data sheet (not opened)"
WHITE_PAPER = "NVIDIA %s white paper (not opened)"
# Its tables repeat NVIDIA's data sheets and white papers: units, clocks, memory, and tensor rates by accumulator.
GPUMAP = "https://github.com/lamonoai/gpumap, nvidia/GPU.md"
NANOCHAT = "the 16-bit rate also from nanochat/common.py of https://github.com/karpathy/nanochat"
# In the compiler's description. `XLA` takes the name of a file in xla/backends/gpu/target_config/specs.
DEVICE_QUERY = "; memory, clock and L2 as deviceQuery prints them"
NO_DEVICE_QUERY = "; no deviceQuery found, so the compiler is given the whole memory"
XLA = "; memory, clock and L2 from XLA's %s.txtpb"
# Units, width and clock make these figures, too: twice the 16-bit rate.
INT8 = "; INT8 from https://hmc-tech.com/gpu/%s"
A100 = "nvidia-h100-vs-nvidia-a100-sxm-40gb"


# fmt: off
# NVIDIA's GPUs for data centers.
NVIDIA_DATA_CENTER_GPUS = (
    chip(
        "p100", "Tesla P100 SXM2", "nvidia", "6.0", {"float32": 10.6, "float16": 21.2}, 16, 732,
        "NVIDIA Tesla P100 data sheet, https://www.nvidia.com/en-us/data-center/tesla-p100/; float16 is plain "
        "arithmetic, there are no tensor cores" + NOT_OPENED + "56 SMs x 64 lanes x 1480 MHz",
        link=nvlink(1, 4),
    ),
    chip(
        "v100", "Tesla V100 SXM2 16GB", "nvidia", "7.0", {"float32": 15.7, "float16": 125}, 16, 900,
        "NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/; 125 also from "
        "https://developer.nvidia.com/programming-tensor-cores-cuda-9-0, which was opened",
        link=nvlink(2, 6),
    ),
    chip(
        "t4", "Tesla T4", "nvidia", "7.5", {"float32": 8.1, "float16": 65, "int8": 130}, 16, 320,
        "NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/ (some versions say 300 GB/s)"
        + NOT_OPENED + "a deviceQuery of a T4: 40 SMs, 1590 MHz, 256 bits at 5001 MHz"
        + INT8 % "nvidia-a800-40gb-vs-nvidia-t4",
        compiler=gpu("7.5", "Tesla T4", 40, 4194304, 1.59, 15828320256, 320.064),
        link=pcie(3, "https://pcpartcomparison.com/gpu/tesla-t4-vs-l4"),
    ),
    chip(
        "a100", "A100 SXM4 80GB", "nvidia", "8.0",
        {"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312, "int8": 624}, 80, 2039,
        "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/, the dense column"
        + NOT_OPENED + "https://www.microway.com/knowledge-center-articles/"
        "in-depth-comparison-of-nvidia-ampere-gpu-accelerators/ for float32, bandwidth and memory" + INT8 % A100,
        compiler=gpu("8.0", "A100-SXM4-80GB", 108, 41943040, 1.41, 85100068864, 2039.04),
        link=nvlink(3, 12),
    ),
    chip(
        "a100-40gb", "A100 SXM4 40GB", "nvidia", "8.0",
        {"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312, "int8": 624}, 40, 1555,
        DATA_SHEET % "A100" + "; rates are those of the 80 GB module, bandwidth from " + GPUMAP
        + XLA % "a100_sxm_40" + INT8 % A100,
        compiler=gpu("8.0", "A100-SXM4-40GB", 108, 41943040, 1.41, 42331013120, 1555.2),
        link=nvlink(3, 12),
    ),
    chip(
        "a100-40gb-pcie", "A100 PCIe 40GB", "nvidia", "8.0",
        {"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312}, 40, 1555,
        DATA_SHEET % "A100" + "; figures from " + GPUMAP + "; memory, clock and L2 of the SXM4 module",
        compiler=gpu("8.0", "A100-PCIE-40GB", 108, 41943040, 1.41, 42331013120, 1555.2),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "a10", "A10", "nvidia", "8.6",
        {"float32": 31.2, "tfloat32": 62.5, "float16": 125, "bfloat16": 125}, 24, 600,
        DATA_SHEET % "A10" + "; figures from " + GPUMAP + DEVICE_QUERY,
        compiler=gpu("8.6", "A10", 72, 6291456, 1.695, 23696375808, 600.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "a40", "A40", "nvidia", "8.6",
        {"float32": 37.4, "tfloat32": 74.8, "float16": 149.7, "bfloat16": 149.7}, 48, 696,
        DATA_SHEET % "A40" + "; figures from https://hmc-tech.com/gpu/nvidia-a16-vs-nvidia-a40 and " + GPUMAP
        + "; " + NANOCHAT + DEVICE_QUERY,
        compiler=gpu("8.6", "A40", 84, 6291456, 1.74, 47608692736, 696.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "l4", "L4", "nvidia", "8.9",
        {"float32": 30.3, "tfloat32": 60, "float16": 121, "bfloat16": 121, "fp8": 242.5}, 24, 300,
        "NVIDIA L4 product page, https://www.nvidia.com/en-us/data-center/l4/" + SPARSE
        + NOT_OPENED + "58 SMs x 2040 MHz only",
        compiler=gpu("8.9", "L4", 58, 50331648, 2.04, 23660331008, 300.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "l40s", "L40S", "nvidia", "8.9",
        {"float32": 91.6, "tfloat32": 183, "float16": 366.5, "bfloat16": 366.5, "fp8": 733, "int8": 733}, 48, 864,
        "NVIDIA L40S data sheet, copied at https://www.mullet.se/product.html?product_id=355414" + SPARSE
        + " (its own dense 362.05 is less than that half); also " + GPUMAP + DEVICE_QUERY
        + INT8 % "nvidia-l40s-vs-nvidia-t40",
        compiler=gpu("8.9", "L40S", 142, 100663296, 2.52, 47576711168, 864.096),
        link=pcie(4, GPUMAP),
    ),
    chip(
        "h100", "H100 SXM5", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9, "int8": 1978.9},
        80, 3350,
        "NVIDIA H100 product page, https://www.nvidia.com/en-us/data-center/h100/" + SPARSE
        + NOT_OPENED + "https://glennklockwood.com/garden/processors/h100",
        compiler=gpu("9.0", "H100 80GB HBM3", 132, 52428800, 1.98, 84942979072, 3352),
        link=nvlink(4, 18),
    ),
    chip(
        "h100-pcie", "H100 PCIe", "nvidia", "9.0",
        {"float32": 51, "tfloat32": 378, "float16": 756, "bfloat16": 756, "fp8": 1513, "int8": 1513}, 80, 2039,
        "NVIDIA's table at https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html (which rounds the bandwidth "
        "to 2000)" + SPARSE + "; " + NANOCHAT + XLA % "h100_pcie" + INT8 % A100,
        compiler=gpu("9.0", "H100 PCIe", 114, 52428800, 1.755, 84942979072, 2039.04),
        link=pcie(5, GPUMAP),
    ),
    chip(
        "h100-nvl", "H100 NVL", "nvidia", "9.0",
        {"float32": 60, "tfloat32": 417.5, "float16": 835, "bfloat16": 835, "fp8": 1670.5}, 94, 3938,
        DATA_SHEET % "H100" + SPARSE + "; " + NANOCHAT + "; bandwidth from https://grokipedia.com/page/210100120 "
        "(a bus of 6016 bits); memory, clock and L2 as nvidia-smi and PyTorch report them",
        compiler=gpu("9.0", "H100 NVL", 132, 62914560, 1.785, 95830 * 2**20, 3938),
        link=pcie(5, GPUMAP),
    ),
    chip(
        "gh200", "GH200 96GB HBM3", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9}, 96, 4000,
        DATA_SHEET % "GH200" + ", https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip; as many "
        "multiprocessors at the same clock as an H100 SXM5, so its rates; "
        "bandwidth from deviceQuery's bus and memory clock" + DEVICE_QUERY,
        compiler=gpu("9.0", "GH200 480GB", 132, 62914560, 1.98, 102005473280, 4022.784),
        device_kinds=("nvidia gh200 480gb",),
    ),
    chip(
        "h200", "H200 SXM", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9, "int8": 1978.9},
        141, 4800,
        "NVIDIA H200 product page, https://www.nvidia.com/en-us/data-center/h200/" + SPARSE
        + NOT_OPENED + "https://glennklockwood.com/garden/processors/h100 for the rates (those of the H100); "
        "the bandwidth could not be checked",
        compiler=gpu("9.0", "H200", 132, 52428800, 1.98, 151397597184, 4800),
        link=nvlink(4, 18),
    ),
    chip(
        "b200", "B200 (HGX, 1000 W)", "nvidia", "10.0",
        {"float32": 75, "tfloat32": 1100, "float16": 2250, "bfloat16": 2250, "fp8": 4500, "fp4": 9000}, 180, 7700,
        "NVIDIA Blackwell data sheet, HGX B200 column, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
        + SPARSE + NOT_OPENED
        + "the copy of its table at https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html",
        compiler=gpu("10.0", "B200", 148, 132644864, 1.965, 191514411008, 7672.32),
        link=nvlink(5, 18),
    ),
    chip(
        "b300", "B300 (HGX)", "nvidia", "10.3",
        {"float32": 75, "tfloat32": 1125, "float16": 2250, "bfloat16": 2250, "fp8": 4500, "fp4": 13500}, 268, 7672,
        "https://glennklockwood.com/garden/processors/B300, the HGX table, for the rates, but FP4's, 1.5 "
        "times a B200's; memory (268 GiB of the 288 GB fitted), clock, L2 and a bus of 7680 bits as a B300 SXM6 AC "
        "reports them",
        compiler=gpu("10.3", "B300 SXM6 AC", 148, 132644864, 2.032, 275040 * 2**20, 7672.32),
        device_kinds=("nvidia b300 sxm6 ac",),
        link=nvlink(5, 18),
    ),
)

# NVIDIA's GPUs for desktop machines: GeForce, and RTX for workstations. Their rates are those of products that
# accumulate in float32, which GeForce cards run at half the rate of those that accumulate in float16, FP8 included.


_UNITS = "; the rates are multiprocessors x clock x the width that the multiprocessors of this generation share"
# Eight lanes, 15.754 GB/s.
_AD106 = (
    "https://hardwareluxx.de/index.php/artikel/hardware/grafikkarten/61026-geforce-rtx-4060-ti-mit-8-gb-im-test.html"
)

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
        {"float32": 104.8, "tfloat32": 104.8, "float16": 209.5, "bfloat16": 209.5, "fp8": 419, "fp4": 1676}, 32, 1792,
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

# Google's TPUs.
_GOOGLE = "Google Cloud documentation, https://docs.cloud.google.com/tpu/docs/"

GOOGLE_TPUS = (
    chip(
        "v2", "TPU v2", "google", "v2", {"bfloat16": 45}, 16, 700,
        _GOOGLE + "v2 (page not opened; 4 chips x 45 = the 180 teraflops of Google's TPU v2 board)",
        devices=2,
    ),
    chip("v3", "TPU v3", "google", "v3", {"bfloat16": 123}, 32, 900, _GOOGLE + "v3", devices=2),
    chip(
        "v4", "TPU v4", "google", "v4", {"bfloat16": 275}, 32, 1200,
        _GOOGLE + "v4",
        compiler=TpuSlices("v4", 3),
        link=ici(600, "6 links of 400 Gb/s a direction, https://glennklockwood.com/garden/processors/TPUv4"),
    ),
    chip(
        "v5e", "TPU v5e", "google", "v5e", {"bfloat16": 197, "int8": 393}, 16, 819,
        _GOOGLE + "v5e (a later version of the page says 800 GiB/s); INT8 from v6e",
        compiler=TpuSlices("v5e", 2), device_kinds=("tpu v5 lite",),
        link=ici(400, _GOOGLE + "v5e"),
    ),
    chip(
        "v5p", "TPU v5p", "google", "v5p", {"bfloat16": 459}, 95, 2765,
        _GOOGLE + "tpu7x, the table of three generations (its FP8 rate is the bfloat16 rate: no FP8 hardware)",
        compiler=TpuSlices("v5p", 3), device_kinds=("tpu v5",),
        link=ici(1200, _GOOGLE + "v5p"),
    ),
    chip(
        "v6e", "TPU v6e (Trillium)", "google", "v6e", {"bfloat16": 918, "int8": 1836}, 32, 1638,
        _GOOGLE + "v6e, and no FP8 hardware from tpu7x, where its FP8 rate is the bfloat16 rate",
        compiler=TpuSlices("v6e", 2), device_kinds=("tpu v6 lite",),
        link=ici(800, _GOOGLE + "v6e"),
    ),
    chip(
        "v7x", "TPU7x (Ironwood)", "google", "v7x", {"bfloat16": 2307, "fp8": 4614}, 192, 7380, _GOOGLE + "tpu7x",
        devices=2,
        compiler=TpuSlices("tpu7x", 3), device_kinds=("tpu7x",),
        link=ici(1200, _GOOGLE + "tpu7x"),
    ),
)

# AMD's Instinct GPUs.
_ROCM = "ROCm documentation, https://rocm.docs.amd.com/en/latest/reference/gpu-arch/"

AMD_GPUS = (
    chip(
        "mi100", "Instinct MI100", "amd", "gfx908", {"float32": 46.1, "float16": 184.6, "bfloat16": 92.3}, 32, 1228.8,
        _ROCM + "mi100.html, the matrix rows",
    ),
    chip(
        "mi250x", "Instinct MI250X", "amd", "gfx90a", {"float32": 95.7, "float16": 383, "bfloat16": 383}, 128, 3276.8,
        "AMD Instinct MI250X product page, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html "
        "(not opened); rates per unit and clock from " + _ROCM + "mi250.html, the matrix rows, times 220 units",
        devices=2, device_kinds=("amd instinct mi250x / mi250",),
    ),
    chip(
        "mi300x", "Instinct MI300X", "amd", "gfx942",
        {"float32": 163.4, "tfloat32": 653.7, "float16": 1307.4, "bfloat16": 1307.4, "fp8": 2614.9}, 192, 5300,
        _ROCM + "mi300.html, the matrix rows; memory from AMD's product page, "
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (not opened)",
    ),
)
