"""The digits recipe from its config to its files; what a full run reaches is in docs/tables/digits-parity.md."""

import csv
import dataclasses
import json

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.precision.policy import PolicyChoice
from keras_mp.system.packages import install_command
from recipes import digits as recipe
from recipes.datasets.digits import load

QUICK = dataclasses.replace(recipe.digits(), epochs=2, width=4, batch_size=128)


@pytest.mark.slow
def test_a_short_training_leaves_whole_files_and_without_tensorflow_prints_the_commands(
    tmp_path, data_dir, monkeypatch, capsys
):
    def missing(*arguments, **options):
        raise ImportError("TensorFlow is not installed")

    # What is exported: test_cifar10.py.
    monkeypatch.setattr(keras_mp, "export_float32", missing)
    config = dataclasses.replace(QUICK, epochs=1, policy="mixed_bfloat16", output=str(tmp_path), data_dir=data_dir)
    result = recipe.train(config)
    names = {path.name for path in (tmp_path / "digits").iterdir()}
    assert names >= {"model.keras", "history.csv", "curves.png", "summary.json"}
    assert not any("partial" in name for name in names)

    with (tmp_path / "digits" / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1"]
    assert float(rows[-1]["test_accuracy"]) == pytest.approx(result.value)

    images, labels = load("test", data_dir)
    keras.mixed_precision.set_global_policy("float32")
    model = keras.saving.load_model(tmp_path / "digits" / "model.keras")
    assert model.layers[-1].get_layer("stem_conv").compute_dtype == "bfloat16"
    predicted = model.predict(images, verbose=0).argmax(-1)
    assert np.mean(predicted == labels) == pytest.approx(result.value, abs=0.01)

    summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
    assert summary["config"]["policy"] == summary["result"]["policy"] == "mixed_bfloat16"
    assert summary["versions"]["keras"] == keras.__version__
    assert (tmp_path / "digits" / "curves.png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    assert f"{result.value:.2%}" in printed
    assert result.saved_model is None and install_command("tensorflow") in printed
    assert f"keras-mp export {tmp_path}/digits/model.keras {tmp_path}/digits/saved_model" in printed


@pytest.mark.jax
def test_the_train_step_is_jitted_on_jax():
    choice = PolicyChoice("float32", True, "")
    assert recipe.model_to_train(QUICK, choice, 10).jit_compile == (keras.backend.backend() == "jax")
