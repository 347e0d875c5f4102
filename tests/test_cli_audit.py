"""`keras-mp audit`, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "keras_mp.cli", "audit", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def model_file(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="dense")], name="small")
    model.layers[0].bias.assign([0.0, 0.0, 1e5, 0.0])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "small.keras")
    return tmp_path / "small.keras"


def test_a_file_with_data(model_file, tmp_path):
    x, y = np.ones((20, 6), "float32"), np.zeros(20, "int32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    done = run(model_file, "--data", tmp_path / "data.npz", "--html", tmp_path / "out.html", "--batch-size", 8)
    assert done.returncode == 0, done.stderr
    assert "small: 3 steps in float32" in done.stdout and "unsafe in float16: dense" in done.stdout
    assert "<svg" in (tmp_path / "out.html").read_text() and "random numbers" not in done.stdout


def test_a_file_without_data_and_json(model_file):
    done = run(model_file, "--steps", 2, "--json")
    report = json.loads(done.stdout)
    assert report["steps"] == 2 and any("random numbers" in note for note in report["notes"])


def test_a_recipe():
    done = run("language_model", "--steps", 1, "--layers", 1, "--width", 16, "--batch-size", 2, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == "gpt" and not any("random" in note for note in report["notes"])


def test_bad_input_is_one_line(model_file, tmp_path):
    np.savez(tmp_path / "odd.npz", a=np.ones(3))
    done = run(model_file, "--data", tmp_path / "odd.npz")
    assert done.returncode == 1 and "must hold arrays named x and y, and holds a" in done.stderr


@pytest.mark.slow
def test_a_recipe_takes_no_data(tmp_path):
    done = run("digits", "--data", tmp_path / "odd.npz")
    assert done.returncode == 1 and "a training recipe has data of its own" in done.stderr
