import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("the running backend is not JAX", allow_module_level=True)

import jax

from keras_mp.backend import jax as backend
from keras_mp.backend.common.device import DeviceInfo
from keras_mp.parallel import _jax
from keras_mp.system.quiet_import import has_chip

pytestmark = pytest.mark.jax


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


def test_a_connection_has_the_kit_s_timeout_and_gpus_and_not_those_that_jax_reads_from_slurm(monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: asked.update(options, args=args))
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    _jax.connect(["a:1", "b:1"], 1, None, silence_seconds=150.5, join_seconds=60.0, on_lost=print)
    assert asked.pop("args") == ("a:1", 2, 1)
    assert asked == {
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": 70,
        "heartbeat_timeout_seconds": 311,
    }
    _jax.connect(["a:1", "a:2"], 1, [1], silence_seconds=20.0, join_seconds=60.0, on_lost=print)
    assert asked["local_device_ids"] == [1] and 2 * 20 < asked["heartbeat_timeout_seconds"] <= 60


@pytest.mark.slow
@pytest.mark.skipif(has_chip(), reason="this machine has a chip, and JAX may write about it")
def test_where_no_chip_is_nothing_is_written_about_the_compilers_of_chips():
    code = "import keras_mp, os; keras_mp.set_global_policy('auto'); os.write(2, b'after')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "after")


def test_the_gradient_of_a_lookup_begins_when_that_of_its_rows_is_there():
    rng = np.random.default_rng()
    table, upstream = rng.normal(size=(5, 3)).astype("float32"), rng.normal(size=(2, 4, 3)).astype("float32")
    indices = np.array([[0, 4, 4, -1], [7, 1, 0, 0]])  # one of the last row by its other name, and one of none

    def pulled_back(table, upstream):
        return jax.vjp(lambda table: keras.ops.take(table, indices, axis=0), table)[1](upstream)[0]

    def traced():  # anew: JAX keeps what it has traced of a function
        return jax.jit(lambda *given: pulled_back(*given)).trace(table, upstream)

    def results(program):
        return program.lower().compile()(table, upstream)

    plain = traced()
    with backend.lookups_wait():
        ours = traced()
        np.testing.assert_array_equal(keras.ops.take(table, [1, 2]), table.ravel()[[1, 2]])
    np.testing.assert_array_equal(results(ours), results(plain))
    assert [("optimization_barrier" in str(program.jaxpr)) for program in (plain, ours)] == [False, True]
