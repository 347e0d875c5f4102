import dataclasses

import fake_devices as fake
import keras
import pytest

from keras_mp import backend
from keras_mp.backend.common.device import DeviceInfo
from keras_mp.precision import hardware
from keras_mp.precision.chips import CHIPS
from keras_mp.precision.hardware import DTYPES, Device, current_device, list_devices, support
from keras_mp.precision.policy import choose_policy

# The dtypes, beside float32, that pay on a device.
RULES = [
    *[(tpu, "bfloat16") for tpu in fake.TPUS[:-1]],
    (fake.TPUS[-1], "bfloat16 fp8"),
    (fake.UNKNOWN_TPU, "bfloat16"),
    (fake.P100, ""),
    (fake.V100, "float16"),
    (fake.T4, "float16"),
    (fake.A100, "float16 bfloat16"),
    (fake.RTX_3060, "float16 bfloat16"),
    (fake.L4, "float16 bfloat16 fp8"),
    (fake.H100, "float16 bfloat16 fp8"),
    (fake.H200, "float16 bfloat16 fp8"),
    (fake.B200, "float16 bfloat16 fp8"),
    (fake.MI100, "float16"),
    (fake.MI250X, "float16 bfloat16"),
    (fake.MI300X, "float16 bfloat16"),
    (fake.MI350X, "float16 bfloat16"),
    (fake.RADEON, ""),
    (fake.METAL, ""),
    (fake.ARC, ""),
    (fake.PLAIN_CPU, ""),
    (fake.AVX512_CPU, "bfloat16"),
    (fake.AMX_CPU, "bfloat16"),
    (fake.ARM_CPU, ""),
    (fake.SILENT_CPU, ""),
]


def test_every_device_has_a_rule():
    assert [device for device, _ in RULES] == fake.ALL


def test_a_rule_and_its_reason_a_sentence_that_names_the_device():
    for device, paying in RULES:
        for dtype in DTYPES:
            served = support(dtype, device)
            assert served.ok == (dtype == "float32" or dtype in paying.split()), (device.name, dtype)
            assert served.reason.startswith(device.name) and served.reason.endswith("."), served.reason


def test_a_reason_says_why():
    for dtype, device, said in [
        ("fp8", fake.A100, "8.9 is the first"),
        ("fp8", fake.MI300X, "FNUZ"),
        ("fp8", fake.MI300X, "the same numerics"),
        ("fp8", fake.PLAIN_CPU, "the same numerics"),
        ("fp8", fake.TPUS[3], "the same numerics"),
        ("fp8", fake.UNKNOWN_TPU, "unknown generation"),
        ("mxfp8", fake.B200, "use JAX" if keras.backend.backend() == "tensorflow" else "MXFP8 tensor cores"),
        ("bfloat16", fake.T4, "compute capability 7.5"),
        ("bfloat16", fake.PLAIN_CPU, "neither avx512_bf16 nor amx_bf16"),
        ("bfloat16", fake.ARM_CPU, "have not been measured"),
        ("bfloat16", fake.SILENT_CPU, "does not report it"),
        ("bfloat16", fake.METAL, "Apple GPU"),
        ("bfloat16", fake.ARC, "unknown vendor"),
        ("float16", fake.AVX512_CPU, "slower in float16"),
        ("float32", fake.TPUS[2], "rounds the operands of matrix products to bfloat16"),
    ]:
        assert said in support(dtype, device).reason


def test_compute_capability_compares_as_numbers():
    assert support("fp8", Device("gpu", "NVIDIA Thor", "11.0")).ok
    assert support("bfloat16", fake.B200).ok


def test_a_tpu_of_a_new_generation_multiplies_in_what_its_row_says():
    for peak in ({"bfloat16": 5e15, "fp8": 1e16}, {"bfloat16": 5e15}):
        chip = dataclasses.replace(CHIPS["v7x"], name="v9x", title="TPU9x", architecture="v9x", peak=peak)
        assert support("fp8", Device("tpu", "TPU9x", "v9x", chip)).ok == ("fp8" in peak)


def test_the_turings_with_and_without_tensor_cores():
    """The compute capability of both is 7.5."""
    for name in ("NVIDIA GeForce GTX 1660 Ti", "NVIDIA GeForce GTX 1650", "NVIDIA T1000 8GB"):
        for dtype in ("float16", "bfloat16", "fp8"):
            served = support(dtype, Device("gpu", name, "7.5"))
            assert not served.ok and "has no tensor cores" in served.reason and name in served.reason
        assert choose_policy(Device("gpu", name, "7.5")).policy == "float32"
    for name in ("Tesla T4", "NVIDIA GeForce RTX 2060", "NVIDIA TITAN RTX", "Quadro RTX 4000"):
        assert support("float16", Device("gpu", name, "7.5")).ok, name


def test_rocm_may_append_features_to_the_target():
    assert support("bfloat16", Device("gpu", "AMD Instinct MI210", "gfx90a:sramecc+:xnack-")).ok


def test_unknown_dtype():
    for dtype in ("float8", "mixed_bfloat16", ""):
        with pytest.raises(ValueError, match=f"dtype='{dtype}' must be one of 'float32', 'float16', 'bfloat16', 'fp8'"):
            support(dtype, fake.H100)


def test_vendor():
    google, nvidia = (fake.TPUS[0], fake.UNKNOWN_TPU), (fake.H100, fake.RTX_3060)
    of_vendors = {"google": google, "nvidia": nvidia, "amd": (fake.MI100, fake.RADEON), "apple": (fake.METAL,)}
    for vendor, devices in (of_vendors | {"": (fake.ARC, *fake.CPUS)}).items():
        assert [device.vendor for device in devices] == [vendor] * len(devices)


def test_list_devices_counts_and_completes(monkeypatch):
    infos = [*[DeviceInfo("tpu", "TPU v5 lite", "")] * 4, DeviceInfo("cpu", "", "")]
    monkeypatch.setattr(backend, "local_devices", lambda: infos)
    monkeypatch.setattr(hardware, "cpu_name", lambda: "Host")
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert list_devices() == [
        Device("tpu", "TPU v5 lite", "v5e", CHIPS["v5e"], count=4),
        Device("cpu", "Host", flags=frozenset({"amx_bf16"})),
    ]
    assert current_device().name == "TPU v5 lite"


def test_list_devices_takes_the_architecture_that_the_runtime_tells(monkeypatch):
    # A GPU that TensorFlow for ROCm names without its target, and one that the table does not have.
    infos = [DeviceInfo("gpu", "AMD Instinct MI300X", ""), DeviceInfo("gpu", "NVIDIA L40", "8.9")]
    monkeypatch.setattr(backend, "local_devices", lambda: infos)
    known, other = list_devices()
    assert (known.architecture, known.chip) == ("gfx942", CHIPS["mi300x"])
    assert (other.architecture, other.chip) == ("8.9", None)
    assert support("fp8", other).ok


@pytest.mark.jax
def test_this_machine():
    device = current_device()
    assert device.kind in ("cpu", "gpu", "tpu") and device.name and device.count >= 1
    assert support("float32") == support("float32", device)
