from types import SimpleNamespace

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("the running backend is not JAX", allow_module_level=True)

import jax

from keras_mp.backend import jax as backend
from keras_mp.backend.common.device import DeviceInfo


def fake(platform, kind, peak=None, **attributes):
    stats = None if peak is None else {"peak_bytes_in_use": peak}
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats, **attributes)


@pytest.mark.parametrize(
    ("device", "info"),
    [
        (fake("gpu", "NVIDIA H200", compute_capability="9.0"), ("gpu", "NVIDIA H200", "9.0")),
        (fake("gpu", "AMD Instinct MI300X", compute_capability="gfx942"), ("gpu", "AMD Instinct MI300X", "gfx942")),
        (fake("tpu", "TPU v5 lite"), ("tpu", "TPU v5 lite", "")),
        (fake("METAL", "Metal"), ("gpu", "Metal", "")),
    ],
)
def test_an_accelerator_and_its_host(monkeypatch, device, info):
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    devices = backend.local_devices()
    assert devices[:2] == [DeviceInfo(*info)] * 2
    assert [device.kind for device in devices[2:]] == ["cpu"]


def test_a_runtime_that_fails(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(RuntimeError, match="could not start its devices: .*'cuda'.* JAX_PLATFORMS='cuda' allows no"):
        backend.local_devices()


def test_peak_memory_is_that_of_the_fullest_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [fake("tpu", "TPU v4", peak) for peak in (5, None, 7)])
    assert backend.peak_memory_bytes() == 7


def test_peak_memory_of_an_accelerator_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [fake("gpu", "Metal")])
    assert backend.peak_memory_bytes() is None
