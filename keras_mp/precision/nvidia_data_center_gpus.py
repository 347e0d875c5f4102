"""NVIDIA's GPUs for data centers."""

from keras_mp.precision.chip import chip, gpu
from keras_mp.precision.link import nvlink, pcie
from keras_mp.precision.nvidia_sources import (
    A100,
    DATA_SHEET,
    DEVICE_QUERY,
    GPUMAP,
    INT8,
    NANOCHAT,
    NOT_OPENED,
    SPARSE,
    XLA,
)

# fmt: off
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
        {"float32": 75, "tfloat32": 1100, "float16": 2250, "bfloat16": 2250, "fp8": 4500}, 180, 7700,
        "NVIDIA Blackwell data sheet, HGX B200 column, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
        + SPARSE + NOT_OPENED
        + "the copy of its table at https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html",
        compiler=gpu("10.0", "B200", 148, 132644864, 1.965, 191514411008, 7672.32),
        link=nvlink(5, 18),
    ),
    chip(
        "b300", "B300 (HGX)", "nvidia", "10.3",
        {"float32": 75, "tfloat32": 1125, "float16": 2250, "bfloat16": 2250, "fp8": 4500}, 268, 7672,
        "https://glennklockwood.com/garden/processors/B300, the table of the HGX variant, for the rates; memory (268 "
        "GiB of the 288 GB fitted), clock, L2 and a bus of 7680 bits as a B300 SXM6 AC reports them",
        compiler=gpu("10.3", "B300 SXM6 AC", 148, 132644864, 2.032, 275040 * 2**20, 7672.32),
        device_kinds=("nvidia b300 sxm6 ac",),
        link=nvlink(5, 18),
    ),
)
# fmt: on
