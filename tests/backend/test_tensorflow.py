import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the running backend is not TensorFlow", allow_module_level=True)

import tensorflow as tf

from keras_mp.backend import tensorflow as backend
from keras_mp.backend.common.device import DeviceInfo


@pytest.fixture
def visible(monkeypatch):
    """Puts GPUs with these details, as TensorFlow gives them, before the CPU."""

    def put(*details):
        gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(len(details))]
        cpu = tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda: [cpu, *gpus])
        by_name = {gpu.name: detail for gpu, detail in zip(gpus, details, strict=True)}
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: by_name[gpu.name])

    return put


def test_nvidia_rocm_and_metal(visible):
    visible(
        {"device_name": "NVIDIA H200", "compute_capability": (9, 0)},
        {"device_name": "AMD Instinct MI300X"},
        {"device_name": "METAL"},
        {},
    )
    assert backend.local_devices()[:4] == [
        DeviceInfo("gpu", "NVIDIA H200", "9.0"),
        DeviceInfo("gpu", "AMD Instinct MI300X", ""),
        DeviceInfo("gpu", "METAL", ""),
        DeviceInfo("gpu", "/physical_device:GPU:3", ""),
    ]
    assert backend.local_devices()[4].kind == "cpu"


def test_a_runtime_that_fails(monkeypatch):
    def fail():
        raise tf.errors.InternalError(None, None, "CUDA is unwell")

    monkeypatch.setattr(tf.config, "get_visible_devices", fail)
    with pytest.raises(RuntimeError, match="TensorFlow .* could not list its devices: .*CUDA is unwell"):
        backend.local_devices()


def test_peak_memory_is_that_of_the_fullest_accelerator(monkeypatch):
    devices = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(2)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices)
    peaks = {"/device:GPU:0": {"peak": 5}, "/device:GPU:1": {"peak": 7}}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", peaks.__getitem__)
    assert backend.peak_memory_bytes() == 7


def test_peak_memory_of_an_accelerator_that_does_not_tell(monkeypatch):
    def refuse(name):
        raise ValueError("no memory information")

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: [tf.config.LogicalDevice("/device:GPU:0", "GPU")])
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", refuse)
    assert backend.peak_memory_bytes() is None
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 0, "peak": 0})
    assert backend.peak_memory_bytes() is None


def test_a_process_takes_its_share_of_the_gpus(monkeypatch):
    from keras_mp.parallel import _tensorflow as workers

    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    taken = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: taken.append((devices, kind)))
    workers._take_gpus(None)
    workers._take_gpus([1])
    assert taken == [([gpus[1]], "GPU")]
    with pytest.raises(ValueError, match="would take GPU 2, and its machine has 2: start fewer"):
        workers._take_gpus([2])
