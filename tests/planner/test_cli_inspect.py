"""`keras-mp inspect` and `keras-mp doctor --chips`, as a user types them."""

import importlib.util
import json
import re

import command_line
import keras
import pytest

from keras_mp import cli
from keras_mp.system.packages import install_command


@pytest.fixture
def model_file(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="dense")], name="small")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "small.keras")
    return tmp_path / "small.keras"


def test_doctor_lists_the_chips():
    done = command_line.run("doctor", "--chips")
    assert done.returncode == 0 and done.stderr == ""
    assert "h100" in done.stdout and "TPU v5e" in done.stdout
    assert re.search(r"v7x .* 96.0 GiB a device, 2\s", done.stdout)
    assert re.search(r"t4 .* 14.7 GiB", done.stdout)  # as `inspect` says


def test_the_chips_come_with_the_whole_command_that_installs_a_compiler(monkeypatch, capsys):
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else installed(name))
    cli.doctor(chips=True)
    out = capsys.readouterr().out
    assert f"To get the compilers that are missing: {install_command('inspect')}\n" in out
    assert '[inspect]"' in out and "JAX_PLATFORMS=cpu" in out
    ready = [line.split("│")[-2].strip() for line in out.splitlines() if line.count("│") == 5]
    assert set(filter(None, ready)) == {"yes", "no"}  # a cell of two lines leaves one empty


def test_a_model_file(model_file, tmp_path):
    done = command_line.run("inspect", model_file, "--batch-size", 3, "--json", "--html", tmp_path / "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["batch"] == ["float32[3, 6]", "int32[3]"]
    assert {matmul["role"] for matmul in report["matmuls"]} == {"forward", "kernel gradient"}
    assert "dense" in (tmp_path / "report.html").read_text()


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")
@pytest.mark.slow
def test_several_chips(model_file):
    done = command_line.run(
        *("inspect", model_file, "--batch-size", 16, "--target", "h100x8", "--strategy", "fully_sharded", "--json")
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["strategy"], report["devices"], report["target"]) == ("fully_sharded", 8, "h100")
    assert {collective["group"] for collective in report["collectives"]} == {8}


@pytest.mark.slow
def test_a_language_model_of_kerashub_has_the_length_that_is_given(tmp_path):
    models = pytest.importorskip("keras_hub", reason="KerasHub is not installed").models
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 32}
    models.GPT2CausalLM(models.GPT2Backbone(vocabulary_size=50, **sizes)).save(tmp_path / "gpt2.keras")
    done = command_line.run("inspect", tmp_path / "gpt2.keras", "--batch-size", "2", "--length", "6", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["training"] and report["batch"] == ["int32[2, 6]", "int32[2, 6]", "int32[2, 6]"]
    refused = command_line.run("inspect", tmp_path / "gpt2.keras")
    assert refused.returncode == 1 and "give the size with --length" in refused.stderr


def test_a_function_that_builds_a_model(tmp_path):
    (tmp_path / "built.py").write_text(
        "import keras\n"
        "def net(units: int = 4, kind: str | list = 'plain', policy: str = 'float32'):\n"
        "    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, dtype=policy)], name=kind)\n"
        "def config(): return {}\n"
        "def needs(units): return None\n"
    )
    place = tmp_path / "built.py"
    done = command_line.run("inspect", f"{place}:net", "--units", "3", "--kind", "wide", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["batch"] == ["float32[8, 6]"] and {matmul["role"] for matmul in report["matmuls"]} == {"forward"}
    done = command_line.run("inspect", f"{place}:net", "--untis", "3")
    assert done.returncode == 2 and "No such option: --untis (Possible options: --units)" in done.stderr
    for name, said in (
        ("config", "defines no train(config), which a training recipe has: build() must return a keras.Model"),
        ("needs", "cannot be built: its argument units has no default"),
    ):
        done = command_line.run("inspect", f"{place}:{name}")
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
