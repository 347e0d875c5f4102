import os
import re
import subprocess
import sys

import keras
import pytest
from fake_devices import PLAIN_CPU, chip_device
from rich.console import Console

import keras_mp.precision.hardware
import keras_mp.precision.policy
from keras_mp.precision import doctor as doctor_module
from keras_mp.precision.chips import CHIPS
from keras_mp.precision.doctor import configured_backend, doctor, main
from keras_mp.precision.hardware import Device


def page(width=80):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    main(console)
    return console.export_text()


def flat(text):
    """One line, so that a match does not depend on where a terminal wraps."""
    return re.sub(r"\s+", " ", text)


def test_the_page_of_this_environment():
    text = flat(page())
    assert f"keras {keras.__version__}" in text
    assert f"{keras.backend.backend()} " in text and "(the backend)" in text
    choice = keras_mp.precision.policy.choose_policy()
    assert f"policy {choice.policy} jit_compile {choice.jit_compile} because {choice.reason}" in text
    for dtype in keras_mp.hardware.DTYPES:
        assert f"{dtype} {'yes' if keras_mp.hardware.support(dtype).ok else 'no'} " in text


def test_it_fits_80_columns_and_needs_no_colour():
    assert max(len(line.rstrip()) for line in page().splitlines()) <= 80


@pytest.mark.parametrize("name", CHIPS)
def test_the_page_of_every_chip(monkeypatch, name):
    device = chip_device(name)
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [device])
    text = flat(page())
    assert f"1 x {device.name} {device.architecture}" in text
    assert f"What pays on this {device.kind.upper()}" in text
    assert f"policy {keras_mp.precision.policy.choose_policy(device).policy} " in text


def test_missing_extras(monkeypatch):
    absent = {"sklearn", "matplotlib"}
    installed = doctor_module._installed
    monkeypatch.setattr(doctor_module, "_installed", lambda module: module not in absent and installed(module))
    text = flat(page())
    assert 'pip install "keras-mp[data]"' in text and 'pip install "keras-mp[plots]"' in text
    assert 'pip install "keras-mp[jax]"' not in text


def test_missing_backend(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(doctor_module, "_installed", lambda module: module != "jax")
    text = flat(page())
    assert "Keras is set to the backend 'jax', which is not installed." in text
    assert 'Way out: export KERAS_BACKEND=tensorflow, or pip install "keras-mp[jax]"' in text
    assert "What pays" not in text


def test_no_backend_at_all(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setattr(doctor_module, "_installed", lambda module: module == "keras")
    text = flat(page())
    assert 'Way out: pip install "keras-mp[tensorflow]"' in text
    assert "KERAS_BACKEND=" not in text


def test_unsupported_backend(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert "set to the backend 'torch', and keras_mp runs on tensorflow and jax" in flat(page())


def test_a_backend_that_fails_to_start(monkeypatch):
    def fail():
        raise RuntimeError("no devices today")

    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", fail)
    assert f"{keras.backend.backend()} is installed but does not work: no devices today" in flat(page())


def test_an_accelerator_that_the_backend_does_not_see(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_module, "_DRIVERS", ((tmp_path, "NVIDIA GPU", "tensorflow[and-cuda]", "jax[cuda12]"),))
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [PLAIN_CPU])
    package = {"tensorflow": "tensorflow[and-cuda]", "jax": "jax[cuda12]"}[keras.backend.backend()]
    assert f'does not see: pip install "{package}"' in flat(page())
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
from keras_mp.precision.doctor import main
main()
print(sorted({{"keras", "tensorflow", "jax"}} & set(sys.modules)))
"""
    environment = {**os.environ, "KERAS_BACKEND": name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"set to the backend '{name}', which is not installed" in flat(done.stdout)
    assert done.stdout.endswith("[]\n"), "the page of a missing backend must import none"


def test_doctor_is_renderable_anywhere():
    console = Console(width=40, record=True, file=open(os.devnull, "w"))
    console.print(doctor())
    assert "Versions" in console.export_text()
