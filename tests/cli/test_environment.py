import os
import re
import subprocess
import sys

import keras
import pytest
from fake_devices import AVX512_CPU, PLAIN_CPU, chip_device
from rich.console import Console

import keras_mp.precision.hardware
import keras_mp.precision.policy
import keras_mp.system.host
from keras_mp.cli import environment
from keras_mp.cli.environment import configured_backend, doctor
from keras_mp.precision.chips import CHIPS
from keras_mp.precision.hardware import Device


def page(width=80):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(doctor())
    return console.export_text()


def flat(text):
    """One line, so that a match does not depend on where a terminal wraps."""
    return re.sub(r"\s+", " ", text)


def with_nvidia_driver(monkeypatch, trace):
    """Makes the machine look like one with an NVIDIA GPU that nothing hides."""
    driver = keras_mp.system.host.DRIVERS[0]
    monkeypatch.setattr(keras_mp.system.host, "DRIVERS", (driver._replace(traces=(trace,)),))
    monkeypatch.setattr(keras_mp.system.quiet_import, "_CHIPS", (trace,))
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_auto_says_that_it_does_not_see_the_gpu(monkeypatch, tmp_path):
    with_nvidia_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(keras_mp.precision.policy, "current_device", lambda: AVX512_CPU)
    with pytest.warns(UserWarning, match="driver of an NVIDIA GPU, which .* does not see: pip install"):
        choice = keras_mp.set_global_policy("auto")
    assert "driver of an NVIDIA GPU" in choice.reason
    assert "driver of an NVIDIA GPU" in keras_mp.precision.policy.choose_policy().reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "driver" not in keras_mp.precision.policy.choose_policy().reason


def test_what_pays_agrees_with_what_auto_chooses(monkeypatch):
    """On JAX bfloat16 was said to pay on a CPU on which `auto` then chose float32."""
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [AVX512_CPU])
    text = flat(page())
    chosen = keras_mp.precision.policy.choose_policy(AVX512_CPU).policy
    assert f"bfloat16 {'yes' if chosen == 'mixed_bfloat16' else 'no'} " in text and f"policy {chosen} " in text


def test_the_compilers_of_chips_that_are_not_there(monkeypatch):
    monkeypatch.setattr(environment, "has_chip", lambda: False)
    monkeypatch.setattr(environment, "_installed", lambda module: True)
    assert "Set JAX_PLATFORMS=cpu" in flat(page())
    monkeypatch.setattr(environment, "has_chip", lambda: True)
    assert "JAX_PLATFORMS" not in page()


@pytest.mark.jax
def test_the_page_of_this_environment_fits_80_columns():
    assert max(len(line.rstrip()) for line in page().splitlines()) <= 80
    text = flat(page())
    assert f"keras {keras.__version__}" in text
    assert f"{keras.backend.backend()} " in text and "(the backend)" in text
    choice = keras_mp.precision.policy.choose_policy()
    assert f"policy {choice.policy} jit_compile {choice.jit_compile} because {choice.reason}" in text
    for dtype in keras_mp.precision.hardware.DTYPES:
        policy = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}.get(dtype, dtype)
        assert f"{dtype} {'yes' if keras_mp.precision.policy.pays(policy).ok else 'no'} " in text


def test_the_page_of_every_chip(monkeypatch):
    for device in map(chip_device, CHIPS):
        monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda device=device: [device])
        text = flat(page())
        assert f"1 x {device.name} {device.architecture}" in text
        assert f"What pays on this {device.kind.upper()}" in text
        assert f"policy {keras_mp.precision.policy.choose_policy(device).policy} " in text


def test_missing_extras(monkeypatch):
    absent = {"sklearn", "matplotlib", "onnx"}
    installed = environment._installed
    monkeypatch.setattr(environment, "_installed", lambda module: module not in absent and installed(module))
    text = flat(page())
    assert 'pip install -e ".[data]"' in text and 'pip install -e ".[plots]"' in text
    assert '.[jax]"' not in text and "every extra is installed" not in text


@pytest.mark.parametrize(
    ("backend", "others", "said"),
    [
        (
            "jax",
            True,
            "set to the backend 'jax', which is not installed. Way out: export KERAS_BACKEND=tensorflow, or ",
        ),
        ("tensorflow", False, 'Way out: pip install -e ".[tensorflow]"'),
        ("torch", True, "set to the backend 'torch', and keras_mp runs on tensorflow and jax"),
    ],
)
def test_a_backend_that_is_missing_or_unsupported(backend, others, said, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setattr(environment, "_installed", lambda module: module == "keras" or others and module != backend)
    text = flat(page())
    assert said in text and "What pays" not in text


def test_a_backend_that_fails_to_start(monkeypatch):
    def fail():
        raise RuntimeError("no devices today")

    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", fail)
    assert f"{keras.backend.backend()} is installed but does not work: no devices today" in flat(page())


def test_an_accelerator_that_the_backend_does_not_see(monkeypatch, tmp_path):
    with_nvidia_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [PLAIN_CPU])
    package = {"tensorflow": "tensorflow[and-cuda]", "jax": "jax[cuda13]"}[keras.backend.backend()]
    assert f'does not see: pip install "{package}"' in flat(page())
    monkeypatch.setattr(environment, "_installed", lambda module: module == "keras")
    assert f'pip install -e ".[{keras.backend.backend()}]" "{package}"' in flat(page())
    monkeypatch.undo()
    with_nvidia_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [Device("gpu", "NVIDIA T400", "7.5")])
    assert "does not see" not in page()


def test_configured_backend_is_the_one_that_keras_chooses(monkeypatch, tmp_path):
    assert configured_backend() == keras.backend.backend()
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert configured_backend() == "tensorflow"
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert configured_backend() == "jax"
    (tmp_path / "keras.json").write_text("not json")
    assert configured_backend() == "tensorflow"


@pytest.mark.parametrize("name", ["tensorflow", "jax"])
def test_in_a_process_where_the_backend_is_really_absent(name):
    # A finder that hides the backend, as if it had never been installed.
    program = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else find_spec(name, package)
from rich.console import Console
from keras_mp.cli.environment import doctor
Console().print(doctor())
print(sorted({{"keras", "tensorflow", "jax"}} & set(sys.modules)))
"""
    environment = {**os.environ, "KERAS_BACKEND": name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"set to the backend '{name}', which is not installed" in flat(done.stdout)
    assert done.stdout.endswith("[]\n"), "the page of a missing backend must import none"
