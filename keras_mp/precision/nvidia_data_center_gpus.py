"""NVIDIA's GPUs for data centers."""

from keras_mp.precision.chip import GpuDescription, chip

_SPARSE = "; the tensor-core figures are half of the sparse ones printed there"
# NVIDIA's own pages could not be opened when this was written. What stands in for them is said in each row, and
# the tests compute every figure again from the number of units, their width and their clock.
_NOT_OPENED = "; NVIDIA's page itself not opened, figures checked against "

# fmt: off
NVIDIA_DATA_CENTER_GPUS = (
    chip(
        "p100", "Tesla P100 SXM2", "nvidia", "6.0", {"float32": 10.6, "float16": 21.2}, 16, 732,
        "NVIDIA Tesla P100 data sheet, https://www.nvidia.com/en-us/data-center/tesla-p100/; float16 is plain "
        "arithmetic, there are no tensor cores" + _NOT_OPENED + "56 SMs x 64 lanes x 1480 MHz",
    ),
    chip(
        "v100", "Tesla V100 SXM2 16GB", "nvidia", "7.0", {"float32": 15.7, "float16": 125}, 16, 900,
        "NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/; 125 also from "
        "https://developer.nvidia.com/programming-tensor-cores-cuda-9-0, which was opened",
    ),
    chip(
        "t4", "Tesla T4", "nvidia", "7.5", {"float32": 8.1, "float16": 65}, 16, 320,
        "NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/ (some versions say 300 GB/s)"
        + _NOT_OPENED + "a deviceQuery of a T4: 40 SMs, 1590 MHz, 256 bits at 5001 MHz",
        compiler=GpuDescription(
            "Tesla T4", 40, 64, 1024, 65536, 65536, 4194304, 1.59, 15828320256, 320064 * 10**6,
        ),
    ),
    chip(
        "a100", "A100 SXM4 80GB", "nvidia", "8.0",
        {"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312}, 80, 2039,
        "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/, the dense column"
        + _NOT_OPENED + "https://www.microway.com/knowledge-center-articles/"
        "in-depth-comparison-of-nvidia-ampere-gpu-accelerators/ for float32, bandwidth and memory",
        compiler=GpuDescription(
            "A100-SXM4-80GB", 108, 64, 2048, 167936, 166912, 41943040, 1.41, 85100068864, 2039040 * 10**6,
        ),
    ),
    chip(
        "l4", "L4", "nvidia", "8.9",
        {"float32": 30.3, "tfloat32": 60, "float16": 121, "bfloat16": 121, "fp8": 242.5}, 24, 300,
        "NVIDIA L4 product page, https://www.nvidia.com/en-us/data-center/l4/" + _SPARSE
        + _NOT_OPENED + "58 SMs x 2040 MHz only",
        compiler=GpuDescription(
            "L4", 58, 128, 1536, 102400, 101376, 50331648, 2.04, 23660331008, 300096 * 10**6,
        ),
    ),
    chip(
        "h100", "H100 SXM5", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9}, 80, 3350,
        "NVIDIA H100 product page, https://www.nvidia.com/en-us/data-center/h100/" + _SPARSE
        + _NOT_OPENED + "https://glennklockwood.com/garden/processors/h100",
        compiler=GpuDescription(
            "H100 80GB HBM3", 132, 128, 2048, 233472, 232448, 52428800, 1.98, 84942979072, 3352 * 10**9,
        ),
    ),
    chip(
        "h200", "H200 SXM", "nvidia", "9.0",
        {"float32": 67, "tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "fp8": 1978.9}, 141, 4800,
        "NVIDIA H200 product page, https://www.nvidia.com/en-us/data-center/h200/" + _SPARSE
        + _NOT_OPENED + "https://glennklockwood.com/garden/processors/h100 for the rates (those of the H100); "
        "the bandwidth could not be checked",
        compiler=GpuDescription(
            "H200", 132, 128, 2048, 233472, 232448, 52428800, 1.98, 151397597184, 4800 * 10**9,
        ),
    ),
    chip(
        "b200", "B200 (HGX, 1000 W)", "nvidia", "10.0",
        {"float32": 75, "tfloat32": 1100, "float16": 2250, "bfloat16": 2250, "fp8": 4500}, 180, 7700,
        "NVIDIA Blackwell data sheet, HGX B200 column, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
        + _SPARSE + _NOT_OPENED
        + "the copy of its table at https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html",
        compiler=GpuDescription(
            "B200", 148, 128, 2048, 233472, 232448, 132644864, 1.965, 191514411008, 7672320 * 10**6,
        ),
    ),
)
# fmt: on
