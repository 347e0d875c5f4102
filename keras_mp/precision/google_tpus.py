"""Google's TPUs."""

from keras_mp.precision.chip import TpuSlices, chip
from keras_mp.precision.link import ici

_GOOGLE = "Google Cloud documentation, https://docs.cloud.google.com/tpu/docs/"

# fmt: off
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
# fmt: on
