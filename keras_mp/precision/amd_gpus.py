"""AMD's Instinct GPUs."""

from keras_mp.precision.chip import chip

_ROCM = "ROCm documentation, https://rocm.docs.amd.com/en/latest/reference/gpu-arch/"

# fmt: off
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
# fmt: on
