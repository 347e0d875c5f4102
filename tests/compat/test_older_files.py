"""Files of an older version load, and give the bits that they gave; `write_files.py` says how they were made."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from write_files import MODELS, Noted, answer, train, values  # noqa: E402

FOLDERS = sorted(path.parent for path in HERE.glob("*/*/written.json"))


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


def folder_of(path):
    written = json.loads((path / "written.json").read_text())
    newer = version(written["keras"]) > version(keras.__version__)
    reason = f"Keras {written['keras']} wrote it, and an older Keras does not promise to read its own layers"
    return pytest.param(path, id="-".join(path.parts[-2:]), marks=pytest.mark.skipif(newer, reason=reason))


written = pytest.mark.parametrize("folder", [folder_of(path) for path in FOLDERS])
each_model = pytest.mark.parametrize("name", MODELS)


def load(path):
    return keras.saving.load_model(path)


def expected(path):
    """Inputs, outputs and variables."""
    with np.load(path) as archive:
        state = [archive[f"arr_{index}"] for index in range(sum(name.startswith("arr_") for name in archive.files))]
        return archive["x"], archive["y"], state


def assert_same(actual, wanted):
    assert [(each.shape, each.dtype) for each in actual] == [(each.shape, each.dtype) for each in wanted]
    for index, (have, want) in enumerate(zip(actual, wanted, strict=True)):
        np.testing.assert_array_equal(have, want, err_msg=f"variable {index}")


def assert_answers(model, path):
    x, y, state = expected(path)
    assert_same(values(model), state)
    np.testing.assert_array_equal(answer(model, x), y)


def test_there_are_files_of_both_backends():
    assert [path.name for path in FOLDERS] == ["jax", "tensorflow"]
    for path in FOLDERS:
        assert {each.stem for each in path.glob("*.keras")} == set(MODELS)


@written
@each_model
def test_a_model_of_an_older_version_predicts_the_same_bits(folder, name):
    assert_answers(load(folder / f"{name}.keras"), folder / f"{name}.npz")


def moved(config):
    """A config whose classes and functions of the kit come from a module that is not there."""
    if isinstance(config, list):
        return [moved(each) for each in config]
    if not isinstance(config, dict):
        return config
    config = {key: moved(value) for key, value in config.items()}
    if str(config.get("module")).partition(".")[0] == "keras_mp":
        config["module"] = "keras_mp.moved.elsewhere"
    return config


@each_model
@pytest.mark.parametrize("folder", [folder_of(FOLDERS[0])])
def test_it_loads_whatever_module_it_names(folder, name, tmp_path):
    path = tmp_path / f"{name}.keras"
    with zipfile.ZipFile(folder / path.name) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.namelist():
            content = source.read(member)
            if member == "config.json":
                config = moved(json.loads(content))
                assert "keras_mp.moved.elsewhere" in (content := json.dumps(config))
            target.writestr(member, content)
    assert_same(values(load(path)), expected(folder / f"{name}.npz")[2])


@pytest.mark.parametrize("folder", [folder_of(FOLDERS[0])])
@pytest.mark.slow
def test_a_fresh_process_loads_them_with_keras_and_keras_mp_alone(folder):
    program = (
        "import sys, keras, keras_mp\nfor path in sys.argv[1:]: print(type(keras.saving.load_model(path)).__name__)"
    )
    paths = [str(folder / f"{name}.keras") for name in MODELS]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "KERAS_BACKEND": keras.backend.backend()}
    child = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr
    assert len(child.stdout.split()) == len(MODELS)


@written
def test_their_settings_are_those_of_the_kit(folder):
    model = load(folder / "loss_scaled.keras")
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert model.optimizer.loss_scale == keras_mp.LossScale(initial_scale=2.0**16, growth_interval=3)
    assert model.optimizer.inner_optimizer.gradient_accumulation_steps == 2
    assert load(folder / "static_scaled.keras").optimizer.loss_scale == keras_mp.LossScale.static(2.0**10)
    model = load(folder / "language_model.keras")
    assert isinstance(model, keras_mp.layers.LanguageModel)
    assert isinstance(model.loss, keras_mp.lean.ChunkedCrossEntropy) and model.loss.rows == 4
    assert model.optimizer.loss_scale == keras_mp.LossScale.none()
    assert isinstance(model.get_layer("attends"), keras_mp.layers.SelfAttention)
    delayed = load(folder / "fp8_delayed.keras").get_layer("dense").scaling
    assert delayed == keras_mp.fp8.Scalings.named("delayed", history=4)
    model = load(folder / "fp8_current.keras")
    assert model.get_layer("dense").scaling == keras_mp.fp8.Scalings.named("current", scale="power_of_two")
    assert model.get_layer("rowwise").scaling == keras_mp.fp8.Scalings.named("rowwise")
    assert [each.path for each in sensitive_layers(load(folder / "stabilized.keras"))] == []


@written
def test_a_training_of_an_older_version_goes_on_to_the_same_bits(folder, tmp_path):
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    noted = Noted(0)
    model, checkpoint = train(tmp_path / "checkpoint", noted)
    assert checkpoint.resumed_from.name == "epoch00000-step00000005.npz"
    for state, name in ((noted.values, "resumed"), (values(model), "trained")):
        with np.load(folder / f"{name}.npz") as archive:
            assert_same(state, [archive[key] for key in archive.files])
